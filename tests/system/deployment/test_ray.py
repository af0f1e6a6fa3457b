"""Workers that Ray places: neither the end of an actor nor that of a node costs a stream or a token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.ranks.ray import has_ray
from tests.system.deployment.ray_cluster import RayCluster, RayNode, ray_cluster
from tests.system.deployment.test_ranks import texts
from tests.system.harness import MODEL, ROOT, Troupe, ask, free_port, streaming, troupe

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="needs the package ray (pip install 'pageant[ray]')"),
    pytest.mark.timeout(600),  # two cores have a cluster to start, a deployment, and three lives of a group
]

OPTIONS = ("--executor", "ray", "--num-blocks", "256", "--draft", "off", "--dtype", "float32")
REQUESTS = [ask("One day", max_tokens=300, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]


def options(cluster: RayCluster) -> tuple[str, ...]:
    own = {
        "--ray-address": cluster.address,
        "--scheduler-port": str(free_port()),
        "--rank-port": str(free_port()),
        "--resume-timeout": "120",
    }
    return (*OPTIONS, *(word for pair in own.items() for word in pair))


async def harmed(running: Troupe, harm: Any) -> list[Any]:
    """All requests at once, and while they stream, the harm."""
    async with running.channel() as channel:
        tasks = await streaming(channel, REQUESTS)
        await asyncio.to_thread(harm)
        assert not any(task.done() for task in tasks), "it was done in the middle of the streams"
        return await asyncio.gather(*tasks)


def kill_actor(node: RayNode) -> None:
    (actor,) = node.actors()
    os.kill(actor, signal.SIGKILL)


def scale(directory: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.cli", "scale", f"worker={count}"]
    place = ["--runtime-dir", str(directory / "run")]
    return subprocess.Popen([*command, *place], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def events(running: Troupe, event: str) -> list[dict[str, Any]]:
    return [line for line in running.logs() if line["event"] == event]


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_a_group_over_two_nodes_survives_the_end_of_its_actors_and_of_its_node(cut: str, tmp_path: Path) -> None:
    with ray_cluster(tmp_path, 1, 1) as cluster:
        own = (*options(cluster), f"--{cut}-parallel-size", "2")
        with troupe(tmp_path, "-m", str(MODEL), *own) as running:
            hosts = [node.host for node in cluster.nodes]
            assert [sorted(line["hosts"]) for line in events(running, "ranks_placed")] == [hosts]
            assert [len(node.ranks()) for node in cluster.nodes] == [1, 1]
            wanted = texts(running.generate(REQUESTS))
            for node in cluster.nodes:  # one has the leader, the other the other rank
                assert texts(asyncio.run(harmed(running, lambda node=node: kill_actor(node)))) == wanted
            third = cluster.add()
            assert texts(asyncio.run(harmed(running, cluster.nodes[1].kill))) == wanted
            placed = [sorted(line["hosts"]) for line in events(running, "ranks_placed")]
    assert placed[-1] == [hosts[0], third.host]
    assert len(placed) == 4


def test_a_killed_node_costs_no_stream_and_more_workers_get_more_places(tmp_path: Path) -> None:
    with ray_cluster(tmp_path, 1, 1) as cluster:
        with troupe(tmp_path, *options(cluster), "--workers", "2") as running:
            wanted = texts(running.generate(REQUESTS))
            ordered = scale(tmp_path, 3)
            assert ordered.stdout is not None
            lack = "worker-2 waits for a place: it needs 1 CPU; Ray has 0 CPU free of 2 on 2 nodes\n"
            assert ordered.stdout.readline() == lack
            assert texts(running.generate(REQUESTS)) == wanted, "the others go on meanwhile"
            cluster.add()
            assert ordered.stdout.read() == "done\n"
            assert ordered.wait() == 0
            ordered.stdout.close()
            assert [len(node.actors()) for node in cluster.nodes] == [1, 1, 1]
            assert texts(asyncio.run(harmed(running, cluster.nodes[1].kill))) == wanted
            assert texts(asyncio.run(harmed(running, lambda: kill_actor(cluster.nodes[0])))) == wanted
        assert not any(node.actors() for node in cluster.nodes), "nothing is left behind"
