"""Which actors a run starts: arithmetic over clusters that exist on paper only."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim import Config
from raysim.errors import ClusterError, ConfigError
from raysim.fleet import gpu_shares
from raysim.plan import GIB, Pool, Request, make_plan

CNNS = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")

Node = dict[str, float]


def node(cpus: float, gpus: float = 0, memory: float = 64) -> Node:
    """A node as Ray describes it; memory in GiB."""
    resources = {"CPU": cpus, "memory": memory * GIB}
    return resources | {"GPU": gpus} if gpus else resources


def plan(
    *nodes: Node,
    models: Sequence[str] = CNNS,
    shares: Mapping[str, float] | None = None,
    **changes: Any,
) -> list[Pool]:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return make_plan(Config().replace(dotted), models, shares or {}, nodes)


def counts(pools: Sequence[Pool]) -> dict[str, int]:
    return {pool.name: pool.count for pool in pools}


def total(pools: Sequence[Pool]) -> int:
    return sum(pool.count for pool in pools)


def suggestions(message: str) -> list[dict[str, list[str]]]:
    """`... Try --actors 2 or --cpus 0.5 --gpus 0.25` as flags with their values, one dict each."""
    found = []
    for alternative in message.partition("Try ")[2].split(" or "):
        flags: dict[str, list[str]] = {}
        for word in alternative.split():
            if word.startswith("--"):
                flags[word[2:]] = []
            elif flags:
                flags[list(flags)[-1]].append(word.strip(".,;"))
        found.append(flags)
    return found


def take(
    suggestion: Mapping[str, list[str]], config: Config, shares: Mapping[str, float]
) -> tuple[Config, dict[str, float]]:
    """What a user has after typing a suggestion in addition to the flags that were refused."""
    changes: dict[str, Any] = {}
    new_shares = dict(shares)
    for flag, values in suggestion.items():
        if flag == "fleet.gpus":
            # Shares written out replace the old ones; `shares of at most X` lowers those above X.
            given = dict(value.split("=") for value in values if "=" in value)
            cap = float(values[-1]) if not given else 0.0
            lowered = {model: min(share, cap) for model, share in shares.items()}
            new_shares = {m: float(share) for m, share in given.items()} if given else lowered
        else:
            (value,) = values
            changes[flag] = None if value == "None" else value if flag == "actors" else float(value)
    return config.replace(changes), new_shares


def check_that_what_is_suggested_fits(
    error: ClusterError,
    config: Config,
    models: Sequence[str],
    shares: Mapping[str, float],
    nodes: Sequence[Node],
) -> None:
    found = suggestions(str(error))
    assert all(found), f"nothing to type in: {error}"
    for suggestion in found:
        changed, new_shares = take(suggestion, config, shares)
        try:
            make_plan(changed, models, new_shares, nodes)
        except ClusterError as second:
            pytest.fail(f"\n{error}\n... but {suggestion} gives:\n{second}")


def refusal(
    *nodes: Node,
    models: Sequence[str] = CNNS,
    shares: Mapping[str, float] | None = None,
    **changes: Any,
) -> str:
    """The message of a plan that does not fit. What it suggests is tried, and must fit."""
    with pytest.raises(ClusterError) as error:
        plan(*nodes, models=models, shares=shares, **changes)
    config = Config().replace({key.replace("__", "."): value for key, value in changes.items()})
    check_that_what_is_suggested_fits(error.value, config, models, shares or {}, nodes)
    return str(error.value)


# auto: what the cluster has


def test_auto_starts_an_actor_a_core() -> None:
    (pool,) = plan(node(2))
    assert (pool.count, pool.request, pool.client) == (2, Request(1.0), None)
    assert pool.models == set(CNNS)
    assert pool.name == "pool"


@pytest.mark.parametrize(
    ("cpus", "count"), [(1.0, 8), (2.0, 4), (3.0, 2), (0.5, 16), (8.0, 1), (0.3, 26)]
)
def test_auto_follows_the_cores_asked_for(cpus: float, count: int) -> None:
    assert total(plan(node(8), cpus=cpus)) == count


def test_auto_starts_no_more_actors_than_clients() -> None:
    assert total(plan(node(64), clients=10)) == 10


def test_auto_starts_no_more_actors_than_a_round_can_use() -> None:
    """A cohort of 10; evaluating all 100 clients could use them all."""
    assert total(plan(node(64), eval__clients="cohort")) == 10
    assert total(plan(node(64), eval__clients="all")) == 64


def test_auto_leaves_the_driver_what_it_asks_for() -> None:
    assert total(plan(node(4), driver__cpus=1.0)) == 3
    assert total(plan(node(4), driver__cpus=0.5)) == 3


def test_auto_adds_up_the_nodes() -> None:
    assert total(plan(node(2), node(3), node(1))) == 6


def test_auto_does_not_add_up_what_lies_on_different_nodes() -> None:
    """3 cores on each of two nodes hold one actor of 2 cores each."""
    assert total(plan(node(3), node(3), cpus=2.0)) == 2


def test_auto_stops_where_memory_ends() -> None:
    """1 GiB holds two actors of 0.4 GiB; of 8 GiB, 3 an actor leave room for two."""
    assert total(plan(node(16, memory=1))) == 2
    assert total(plan(node(16, memory=8), memory=3.0)) == 2


def test_auto_starts_one_actor_even_where_memory_is_short() -> None:
    assert total(plan(node(16, memory=0.1))) == 1


def test_actors_that_ask_for_nothing_are_one_a_core() -> None:
    assert total(plan(node(4), cpus=0.0)) == 4
    assert total(plan(node(4), node(2), cpus=0.0)) == 6


# N: what the user says


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_number_starts_that_many(n: int) -> None:
    assert counts(plan(node(8), actors=str(n))) == {"pool": n}


def test_a_number_may_exceed_the_cores_when_each_asks_for_less() -> None:
    assert total(plan(node(2), actors="8", cpus=0.25)) == 8
    assert total(plan(node(2), actors="50", cpus=0.0)) == 50


def test_a_number_may_be_spread_over_nodes() -> None:
    assert total(plan(node(2), node(2), actors="4")) == 4


def test_too_many_actors_are_refused_with_how_many_fit() -> None:
    message = refusal(node(2), actors="3")
    assert message.startswith("3 actors of 1 CPU do not fit: the cluster has 2 CPU and 0 GPU free")
    assert "Try --actors 2 or --cpus 0.5" in message


def test_too_many_actors_beside_a_driver_are_refused_with_how_many_fit() -> None:
    assert "--actors 3" in refusal(node(4), actors="4", driver__cpus=1.0)


@pytest.mark.parametrize("wanted", [3, 5, 7, 16, 100, 1000])
def test_the_share_suggested_for_many_actors_fits(wanted: int) -> None:
    refusal(node(2), actors=str(wanted))
    refusal(node(3), node(1), actors=str(wanted + 2))


def test_the_share_suggested_fits_what_a_driver_leaves_of_a_core() -> None:
    refusal(node(1), actors="2", cpus=0.5, driver__cpus=0.5)


def test_an_actor_larger_than_every_node_is_refused_with_the_largest_that_fits() -> None:
    message = refusal(node(2), node(4), cpus=8.0)
    assert message.startswith("one actor asks for 8 CPU, but no node has more than 4 CPU")
    assert "Try --cpus 4" in message


def test_several_actors_larger_than_every_node_are_told_a_size_that_all_fit() -> None:
    refusal(node(2), cpus=4.0, actors="4")
    refusal(node(2), cpus=4.0, actors="clients", clients=4)


def test_the_user_is_never_told_to_ask_for_more() -> None:
    """4 actors of half a core and half a GPU: cores are not what is missing."""
    for suggestion in suggestions(refusal(node(8, 1), actors="4", cpus=0.5, gpus=0.5)):
        assert float(suggestion.get("cpus", ["0"])[0]) <= 0.5
        assert float(suggestion.get("gpus", ["0"])[0]) <= 0.5
        assert int(suggestion.get("actors", ["4"])[0]) <= 4


# clients: an actor each


def test_every_client_gets_an_actor_of_its_own_name() -> None:
    pools = plan(node(8), actors="clients", clients=7)
    assert [pool.client for pool in pools] == list(range(7))
    assert [pool.name for pool in pools][:2] == ["client-000", "client-001"]
    assert all(pool.count == 1 for pool in pools)
    assert [pool.models for pool in pools] == [{CNNS[i % 5]} for i in range(7)]


def test_every_client_gets_the_share_of_its_model() -> None:
    pools = plan(
        node(8, 2), actors="clients", clients=4, models=("a", "b"), shares={"a": 0.5}, gpus=0.25
    )
    assert [pool.request.gpus for pool in pools] == [0.5, 0.25, 0.5, 0.25]


def test_more_clients_than_fit_are_refused_and_auto_is_suggested() -> None:
    message = refusal(node(2), actors="clients", clients=100)
    assert message.startswith("100 actors of 1 CPU do not fit")
    assert "Try --actors auto or --cpus 0.02" in message


def test_many_clients_fit_with_small_shares() -> None:
    assert len(plan(node(2), actors="clients", cpus=0.02)) == 100


# GPUs


@pytest.mark.parametrize(
    ("share", "gpus", "count"),
    [(1.0, 2, 2), (0.5, 2, 4), (0.25, 2, 8), (0.3, 2, 6), (0.3, 1, 3), (0.4, 3, 6), (0.1, 1, 10)],
)
def test_a_fraction_of_a_gpu_lives_on_one_gpu(share: float, gpus: int, count: int) -> None:
    assert total(plan(node(64, gpus), gpus=share)) == count


def test_several_gpus_for_an_actor_come_from_one_node() -> None:
    assert total(plan(node(8, 4), gpus=2.0)) == 2
    assert total(plan(node(8, 3), node(8, 3), gpus=2.0)) == 2
    message = refusal(node(8, 1), node(8, 1), gpus=2.0)
    assert "Try --gpus 1" in message


def test_a_fraction_must_live_on_one_gpu_of_one_node() -> None:
    """0.6 of a GPU: one on each of two nodes, although 2 / 0.6 is more than 3."""
    assert total(plan(node(8, 1), node(8, 1), gpus=0.6)) == 2
    assert "--actors 2" in refusal(node(8, 1), node(8, 1), gpus=0.6, actors="3")


def test_fractions_of_different_sizes_are_packed_together() -> None:
    """0.7 + 0.3 on each of two GPUs, in whichever order they come."""
    for models in (("a", "b"), ("b", "a")):
        pools = plan(node(8, 2), models=models, shares={"a": 0.7, "b": 0.3}, actors="4")
        assert total(pools) == 4


def test_a_gpu_is_no_use_on_a_node_without_cores_left() -> None:
    assert total(plan(node(1, 4), node(8), gpus=1.0)) == 1
    refusal(node(1, 4), node(8), gpus=1.0, actors="3")


def test_gpus_where_there_are_none_suggest_to_do_without() -> None:
    message = refusal(node(2), gpus=0.5)
    assert message.startswith("one actor asks for 1 CPU, 0.5 GPU, but no node has more than")
    assert suggestions(message) == [{"gpus": ["0"]}]


def test_gpus_where_there_are_none_suggest_to_do_without_for_a_number_too() -> None:
    assert "--gpus 0" in refusal(node(2), gpus=1.0, actors="2")
    assert "--gpus 0" in refusal(node(8), gpus=0.1, actors="clients", clients=4)


def test_too_many_fractions_are_refused_with_a_share_that_fits() -> None:
    message = refusal(node(8, 1), gpus=0.5, actors="4")
    assert "--actors 2" in message
    assert "--gpus 0.25" in message


def test_the_driver_may_take_its_share_of_a_gpu() -> None:
    assert total(plan(node(8, 1), gpus=0.25, driver__gpus=0.5)) == 2
    assert total(plan(node(8, 2), gpus=1.0, driver__gpus=0.5)) == 1
    refusal(node(8, 1), gpus=0.5, actors="2", driver__gpus=0.5)


def test_alternatives_that_need_no_core_are_told_apart() -> None:
    """`Try --actors 2 or --gpus 0.25`: one or the other, not both."""
    found = suggestions(refusal(node(8, 1), cpus=0.0, gpus=0.5, actors="4"))
    assert {"actors": ["2"]} in found
    assert {"gpus": ["0.25"]} in found


# A share for each architecture


def test_architectures_with_their_own_share_become_pools() -> None:
    shares = {"cnn1": 0.5, "cnn2": 0.5, "cnn3": 0.1}
    pools = plan(node(16, 4), shares=shares, actors="6", gpus=0.25)
    assert {pool.name: (pool.request.gpus, set(pool.models)) for pool in pools} == {
        "pool-cnn1-cnn2": (0.5, {"cnn1", "cnn2"}),
        "pool-cnn3": (0.1, {"cnn3"}),
        "pool-cnn4-cnn5": (0.25, {"cnn4", "cnn5"}),
    }


def test_a_share_like_the_others_makes_no_pool() -> None:
    assert counts(plan(node(4, 1), shares={"cnn1": 0.25}, gpus=0.25)) == {"pool": 4}


def test_pools_get_actors_by_the_clients_they_serve() -> None:
    """cnn1 plays 1 client of 5, the others 4 of 5."""
    pools = plan(node(16, 1), shares={"cnn1": 0.01}, actors="10")
    assert counts(pools) == {"pool-cnn1": 2, "pool-cnn2-cnn3-cnn4-cnn5": 8}


def test_every_pool_gets_an_actor() -> None:
    models = ("rare", *["often"] * 99)
    pools = plan(node(4, 1), models=models, shares={"rare": 0.5})
    assert counts(pools) == {"pool-rare": 1, "pool-often": 3}


def test_a_pool_that_is_full_leaves_the_rest_to_the_others() -> None:
    """One GPU holds one actor for `big`; the cores that are left go to `small`."""
    pools = plan(node(8, 1), models=("big", "small"), shares={"big": 1.0})
    assert counts(pools) == {"pool-big": 1, "pool-small": 7}


def test_fewer_actors_than_pools_are_refused_with_how_many_it_takes() -> None:
    message = refusal(node(8, 1), shares={"cnn1": 0.1, "cnn2": 0.2}, actors="2")
    assert "--actors 2" in message.partition("Try")[0]
    assert "Try --actors 3" in message


def test_shares_larger_than_a_gpu_that_is_there_are_refused() -> None:
    message = refusal(node(8, 1), shares={"cnn1": 2.0})
    assert "--fleet.gpus" in message


def test_pools_that_do_not_fit_together_are_told_what_does() -> None:
    """A whole GPU and half of one, on one GPU: no number of actors makes that fit."""
    for actors in ("auto", "clients", "2", "4"):
        refusal(
            node(8, 1), models=("a", "b"), shares={"a": 1.0, "b": 0.5}, actors=actors, clients=4
        )


def test_shares_are_read_from_text() -> None:
    assert gpu_shares(("cnn1=0.25", "cnn2=2"), CNNS) == (("cnn1", 0.25), ("cnn2", 2.0))
    assert gpu_shares((), CNNS) == ()


@pytest.mark.parametrize(
    "entry", ["cnn1", "cnn1=", "cnn1=much", "cnn1=-1", "0.5", "cnn1=nan", "cnn1=1.5"]
)
def test_a_share_that_is_none_is_refused_with_an_example(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^fleet\.gpus .*resnet18=0\.25") as error:
        gpu_shares((entry,), CNNS)
    assert entry in str(error.value)


def test_a_share_for_a_model_nobody_has_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model 'cnn6' in fleet\.gpus; did you mean 'cnn"
    ):
        gpu_shares(("cnn6=0.5",), CNNS)


# Memory and driver


def test_memory_is_counted_by_node() -> None:
    assert total(plan(node(8, memory=4), node(8, memory=4), memory=3.0)) == 2
    message = refusal(node(8, memory=4), node(8, memory=4), memory=3.0, actors="3")
    assert "--actors 2" in message


def test_more_memory_than_a_node_has_is_refused_with_what_it_has() -> None:
    message = refusal(node(8, memory=7.59), memory=100.0)
    assert message.startswith("one actor asks for 1 CPU, 100 GiB, but no node has more than")
    assert "Try --memory 7.5" in message


def test_where_memory_is_short_smaller_actors_are_not_suggested_by_their_cores() -> None:
    """8 cores and 4 GiB: 8 actors of 1 GiB do not fit, however few cores each asks for."""
    assert "--actors 4" in refusal(node(8, memory=4), memory=1.0, actors="8")


def test_a_driver_that_does_not_fit_is_refused_by_its_own_flags() -> None:
    with pytest.raises(ClusterError, match=r"^the driver asks for 4 CPU, .*2 CPU.*--driver\.cpus"):
        plan(node(2), driver__cpus=4.0)
    with pytest.raises(ClusterError, match=r"^the driver asks for 0 CPU, 1 GPU.*--driver\.gpus"):
        plan(node(2), driver__gpus=1.0)


def test_a_driver_that_takes_everything_leaves_a_suggestion() -> None:
    assert "Try --cpus 0" in refusal(node(2), driver__cpus=2.0)


def test_a_cluster_without_nodes_is_an_error() -> None:
    with pytest.raises(ClusterError):
        plan()


def test_resources_on_different_nodes_are_not_taken_for_one() -> None:
    """4 cores here, a GPU there: nothing of 4 cores and a GPU."""
    refusal(node(4), node(1, 1), cpus=4.0, gpus=1.0)
    refusal(node(4), node(1, 1), cpus=4.0, gpus=1.0, actors="2")


def test_a_request_is_told_in_words() -> None:
    assert str(Request(1.0)) == "1 CPU"
    assert str(Request(0.5, 0.25, 1.5)) == "0.5 CPU, 0.25 GPU, 1.5 GiB"
    assert str(Request(0.0)) == "0 CPU"


# Whatever the cluster, whatever is asked for


@st.composite
def situations(draw: st.DrawFn) -> tuple[Config, tuple[str, ...], dict[str, float], list[Node]]:
    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    nodes = [
        node(pick(1, 2, 4, 8), pick(0, 0, 1, 2), pick(2, 8, 64)) for _ in range(pick(1, 1, 2, 3))
    ]
    config = Config().replace(
        {
            "actors": pick("auto", "clients", "1", "2", "3", "4", "7", "12"),
            "clients": pick(1, 3, 6, 12),
            "cpus": pick(0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 4.0),
            "gpus": pick(0.0, 0.0, 0.1, 0.25, 0.3, 0.5, 1.0, 2.0),
            "memory": pick(None, None, 0.5, 1.0, 4.0),
            "driver.cpus": pick(0.0, 0.0, 0.5, 1.0),
            "driver.gpus": pick(0.0, 0.0, 0.5),
        }
    )
    models = ("a", "b", "c")[: pick(1, 2, 3)]
    named = draw(st.sets(st.sampled_from(models)))
    return config, models, {model: pick(0.0, 0.1, 0.5, 1.0) for model in sorted(named)}, nodes


@settings(deadline=None, max_examples=200)
@given(situations())
def test_a_plan_fits_or_names_one_that_does(
    situation: tuple[Config, tuple[str, ...], dict[str, float], list[Node]],
) -> None:
    config, models, shares, nodes = situation
    try:
        pools = make_plan(config, models, shares, nodes)
    except ClusterError as error:
        if not str(error).startswith("the driver asks for"):
            check_that_what_is_suggested_fits(error, config, models, shares, nodes)
        return
    check_that_it_fits(config, pools, nodes)
    played = set().union(*(pool.models for pool in pools))
    if config.actors == "clients":
        assert [pool.client for pool in pools] == list(range(config.clients))
    else:
        assert played == set(models)
    if config.actors.isdigit():
        assert total(pools) == int(config.actors)


def check_that_it_fits(config: Config, pools: Sequence[Pool], nodes: Sequence[Node]) -> None:
    """Each actor fits a node, and all together are no more than there is."""
    requests = [pool.request for pool in pools for _ in range(pool.count)]
    for request in requests:
        assert any(
            request.cpus <= one["CPU"]
            and request.gpus <= one.get("GPU", 0)
            and request.memory * GIB <= one["memory"]
            for one in nodes
        )
    requests.append(Request(config.driver.cpus, config.driver.gpus))
    slack = 1e-6
    assert sum(r.cpus for r in requests) <= sum(one["CPU"] for one in nodes) + slack
    assert sum(r.gpus for r in requests) <= sum(one.get("GPU", 0) for one in nodes) + slack
    assert sum(r.memory for r in requests) * GIB <= sum(one["memory"] for one in nodes) + slack
    for share in {r.gpus for r in requests if 0 < r.gpus <= 1}:
        on_each = math.floor(1 / share + 1e-9)
        assert sum(r.gpus == share for r in requests) <= on_each * sum(
            n.get("GPU", 0) for n in nodes
        )
