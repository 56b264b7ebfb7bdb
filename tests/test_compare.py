"""`python -m raysim.compare`: one command runs, goes on, ranks and reports."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raysim.compare import main


def test_a_comparison_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.yaml").write_text("train.lr: {grid: [1, 2]}\n")
    fleet = ["--fleet.models", "cnn4", "cnn5"]
    for words, told in (
        (["--seeds", "2"], "name the methods"),
        (["--methods", "fedre", "locla"], "did you mean 'local'"),
        (["--methods", "fedavg", "local", *fleet], "with fedavg: fedavg averages whole models"),
        (["--methods", "local", "--out", str(tmp_path)], "holds another comparison"),
        (["--methods", "local", "--seeds", "0"], "--sweep.repeat must be at least 1"),
    ):
        assert main(words) == 2, words
        assert told in capsys.readouterr().err
    assert main([]) == 2
    assert "--methods" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_same_command_goes_on_and_ends_with_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["--clients", "2", "--participation", "1", "--rounds", "2", "--data.samples", "80"]
    words = ["--methods", "fedre", "local", "--fleet.models", "cnn5", *tiny, "--data.alpha", "1"]
    assert main([*words, "--seeds", "1"]) == 0
    (out,) = Path("runs").iterdir()
    assert out.name.startswith("compare-")
    done = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/summary.json")}
    assert len(done) == 2
    assert main([*words, "--seeds", "2"]) == 0
    after = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/summary.json")}
    assert len(after) == 4
    assert done.items() <= after.items()
    ranking = pq.read_table(out / "ranking.parquet").to_pylist()
    assert {row["method"]: row["seeds"] for row in ranking} == {"fedre": 2, "local": 2}
    page = (out / "report.html").read_text()
    assert "fedre" in page
    assert "local" in page
    assert f"report    {out / 'report.html'}" in capsys.readouterr().out
