"""The page itself: everything in one file, with text for what is text and figures drawn from the
embedded data. A policy in its head forbids it any network."""

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from raysim.errors import RunError
from raysim.record import write_text
from raysim.report import tables
from raysim.report.figures import figures
from raysim.report.groups import Group

FIGURES = (
    ("curves", "Accuracy and loss",
     "Lines are means over seeds, bands one sample standard deviation to either side."),
    ("factors", "Accuracy by setting",
     "One point for each configuration; bars are one standard deviation over seeds."),
    ("clients", "Clients' accuracy",
     "One dot for each client in the last evaluation, of all seeds. Boxes hold the middle half of "
     "the clients; the line in it is their median."),
    ("difference", "Client by client",
     "The difference that one method makes to each client, where both had the same data. Above "
     "zero the first is better."),
    ("classes", "Classes over clients",
     "How many samples of each class each client holds."),
    ("traffic", "Traffic by message field",
     "A whole run, up from all clients and down to them; mean over seeds."),
    ("time", "Time by phase",
     "Actors train, evaluate or idle; their seconds add up over actors. The server works on the "
     "driver. Mean over seeds."),
)  # fmt: skip
"""Name, title and caption of each figure, in order; page.js draws them."""


def render(groups: Sequence[Group], notices: Sequence[str] = ()) -> str:
    """`notices` are of what cannot be shown; those of each run come by themselves."""
    data = figures(groups)
    title = _title(groups)
    apart, shared = tables.settings(groups)
    made = {table.title: _table(table) for table in tables.tables(groups)}
    drawn = {name: _figure(name, *words) for name, *words in FIGURES if _any(data, name)}
    body = [
        _header(title, groups),
        _notices(groups, notices),
        made.pop("Results"),
        *drawn.values(),
        *made.values(),
        _table(apart) if apart.rows else "",
        _table(shared, closed=True),
        _table(tables.inventory(groups)),
    ]
    return _PAGE.format(
        title=html.escape(title),
        style=_asset("page.css"),
        body="\n".join(part for part in body if part),
        data=embedded(data),
        script=_asset("draw.js") + _asset("page.js"),
    )


def save(page: str, out: Path) -> None:
    if out.is_dir():
        raise RunError(f"--out {out} is a folder; name a file, such as {out / 'report.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {out}: its folder cannot be made ({error.strerror})") from error
    write_text(out, page)


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: no text in it can end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("raysim.report").joinpath(name).read_text("utf-8")


def _title(groups: Sequence[Group]) -> str:
    names = list(dict.fromkeys(group.label for group in groups))
    data = dict.fromkeys(str(group.settings.get("data.name")) for group in groups)
    named = ", ".join(names) if len(names) <= 3 else f"{len(names)} configurations"
    return f"{named} on {', '.join(data)}"


def _header(title: str, groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    counts = f"{_count(runs, 'run')}, {_count(len(groups), 'configuration')}"
    return f"""<header>
<div><h1>{html.escape(title)}</h1><p>{counts} · raysim</p></div>
<button type="button" id="theme" title="Light or dark">theme: auto</button>
</header>
<noscript><p class="notice">The figures need JavaScript; the tables do not.</p></noscript>
<nav id="legend" aria-label="Series: click to show or hide"></nav>"""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _notices(groups: Sequence[Group], others: Sequence[str]) -> str:
    """A few at once; the rest of many on demand."""
    runs = [run for group in groups for run in group.runs]
    notes = [*others, *(f"{run.folder}: {note}" for run in runs for note in run.notes)]
    if not notes:
        return ""
    items = [f"<li>{html.escape(note)}</li>" for note in notes]
    first, rest = "".join(items[:5]), "".join(items[5:])
    more = f"<details><summary>{len(items) - 5} more</summary><ul>{rest}</ul></details>"
    return f'<section class="notice"><ul>{first}</ul>{more if rest else ""}</section>'


def _any(data: dict[str, Any], name: str) -> bool:
    """Whether there is something to draw."""
    if name == "difference":
        dealt = [
            (i, client["split"])
            for i, group in enumerate(data["clients"])
            for client in group
            if client["split"] is not None
        ]
        return any(a[0] != b[0] and a[1] == b[1] for a in dealt for b in dealt)
    return any(data["splits" if name == "classes" else name])


def _figure(name: str, title: str, caption: str) -> str:
    return f"""<section id="{name}"><h2>{title}</h2>
<div class="controls"></div>
<figure><div class="plot"></div><figcaption>{caption}</figcaption></figure></section>"""


def _table(table: tables.Table, closed: bool = False) -> str:
    """With its text in three forms below it."""
    kind = ' class="words"' if not table.numbers else ""
    head = "".join(f"<th scope=col>{html.escape(name)}" for name in table.columns)
    rows = "".join(
        "<tr>" + "".join(
            f"<{'td' if j else 'th scope=row'}>"
            + ("<b>{}</b>" if (i, j) in table.best else "{}").format(html.escape(cell))
            for j, cell in enumerate(row)
        )
        for i, row in enumerate(table.rows)
    )  # fmt: skip
    forms = {"Markdown": table.markdown(), "LaTeX": table.latex(), "CSV": table.csv()}
    texts = "".join(
        f'<div class="form" data-form="{name}"><pre>{html.escape(text)}</pre></div>'
        for name, text in forms.items()
    )
    name = table.title.lower().replace(" ", "-")
    caption = f"<p>{html.escape(table.caption)}</p>" if table.caption else ""
    inner = f"""<div class="wide"><table{kind}><thead><tr>{head}<tbody>{rows}</table></div>
{caption}<details class="text"><summary>Copy as text</summary>{texts}</details>"""
    if closed:
        inner = f"<details><summary>{len(table.rows)} settings</summary>{inner}</details>"
    return f'<section id="{name}"><h2>{html.escape(table.title)}</h2>{inner}</section>'
