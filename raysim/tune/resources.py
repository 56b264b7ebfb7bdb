"""What a trial asks the cluster for, and whether that could ever be had."""

from collections.abc import Mapping, Sequence
from typing import Any

from raysim.config import Config
from raysim.errors import ClusterError, ConfigError
from raysim.plan import GIB, Nodes, Request, make_plan

Bundle = dict[str, float]


def bundles(config: Config, resources: Sequence[Mapping[str, float]]) -> list[Bundle]:
    """The bundles of a trial's placement group: one for a simulation in its own process; with
    --backend ray one for the driver and one for each client actor. A trial that could not start
    even on an idle cluster is refused: Ray would wait for ever."""
    if config.backend == "local":
        request = Request(config.cpus, config.gpus, config.memory or 0.0)
        nodes = Nodes(resources)
        largest = nodes.largest()
        if not nodes.place(request):
            raise ClusterError(
                f"a trial asks for {request}, and no node has more than {largest.cpus:g} CPU, "
                f"{largest.gpus:g} GPU and {largest.memory:.1f} GiB, so it could never start. "
                f"Try --cpus {min(config.cpus, largest.cpus):g} --gpus "
                f"{min(config.gpus, largest.gpus):g}"
                + (f" --memory {int(largest.memory)}" if config.memory else "")
            )
        return [_bundle(request)]
    if config.actors == "auto":
        raise ConfigError(
            "a trial with actors of its own (--backend ray) needs their number, as trials share "
            "the cluster: add --actors 2"
        )
    import zoo
    from raysim.fleet import gpu_shares

    models = zoo.expand(config.fleet.models)
    pools = make_plan(config, models, dict(gpu_shares(config.fleet.gpus, models)), resources)
    driver = _bundle(Request(config.driver.cpus, config.driver.gpus))
    return [driver, *(_bundle(pool.request) for pool in pools for _ in range(pool.count))]


def _bundle(request: Request) -> Bundle:
    wanted = {"CPU": request.cpus, "GPU": request.gpus, "memory": request.memory * GIB}
    return {name: amount for name, amount in wanted.items() if amount}


def placement(config: dict[str, Any]) -> Any:
    """For Tune: the placement group of the trial that has this config."""
    from ray import tune

    return tune.PlacementGroupFactory(config["trial"]["bundles"], strategy="PACK")


def at_a_time(asked: int | None, found: Sequence[Sequence[Bundle]], cpus: float) -> int | None:
    """How many trials may run together: what the user says; and no more than CPUs when trials ask
    for nothing that runs out."""
    free = any(not any(bundle for bundle in each) for each in found)
    return min(asked or int(cpus), max(1, int(cpus))) if free else asked
