"""What the Kubernetes manifests say. `make chart` makes them, and checks that they are up to date."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.bus.server_config import ServerTls, environment_name, server_config
from baton.cli.serve import SERVICES, WORKERS
from baton.config.load import load
from baton.protocol.access import OPERATOR, USERS

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "deploy" / "manifests"
MODEL_SERVICES = {"tokenizer", "router", "prefill", "decode"}
Object = dict[str, Any]

_spec = importlib.util.spec_from_file_location("deploy_kubernetes", ROOT / "deploy" / "kubernetes.py")
assert _spec is not None and _spec.loader is not None
kubernetes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kubernetes)


@pytest.fixture(scope="module", params=["baton.yaml", "full.yaml"])
def manifest(request: pytest.FixtureRequest) -> list[Object]:
    found: list[Object] = kubernetes.objects((MANIFESTS / request.param).read_text())
    return found


@pytest.fixture(scope="module")
def full() -> list[Object]:
    found: list[Object] = kubernetes.objects((MANIFESTS / "full.yaml").read_text())
    return found


def kinds(manifest: list[Object], kind: str) -> dict[str, Object]:
    return {document["metadata"]["name"]: document for document in manifest if document["kind"] == kind}


def services(manifest: list[Object]) -> dict[str, Object]:
    """Deployments of Baton's services by name."""
    return kinds(manifest, "Deployment")


def component(workload: Object) -> str:
    return str(workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def pod(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]
    return found


def main_container(workload: Object) -> Object:
    [container] = pod(workload)["containers"]
    return dict(container)


def environ(workload: Object) -> dict[str, str]:
    return {one["name"]: one.get("value", "from-elsewhere") for one in main_container(workload)["env"]}


def workloads(manifest: list[Object]) -> list[Object]:
    return [*services(manifest).values(), *kinds(manifest, "StatefulSet").values()]


def selects(selector: Object, labels: Object) -> bool:
    for term in selector.get("matchExpressions", []):
        assert term["operator"] == "In"
        if labels.get(term["key"]) not in term["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def test_every_object_is_as_kubernetes_wants_it(manifest: list[Object]) -> None:
    assert list(kubernetes.problems(manifest, kubernetes.KUBERNETES[-1:])) == []


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "ScaledObject", "HTTPRoute"])
def test_the_check_finds_a_field_that_is_none(full: list[Object], kind: str) -> None:
    broken = copy.deepcopy(next(document for document in full if document["kind"] == kind))
    broken["spec"]["replica"] = 1
    assert list(kubernetes.problems([broken])) != []


def test_each_service_is_there_for_each_model(manifest: list[Object]) -> None:
    models = {name.rpartition("-")[2] for name in services(manifest) if "-prefill-" in name}
    expected = {f"baton-{service}" for service in set(SERVICES) - MODEL_SERVICES}
    expected |= {f"baton-{service}-{model}" for service in MODEL_SERVICES for model in models}
    assert set(services(manifest)) == expected
    assert set(kinds(manifest, "PodDisruptionBudget")) == expected
    for name, workload in services(manifest).items():
        assert (
            main_container(workload)["args"]
            == ["serve", name.split("-")[1]]
            == ["serve", component(workload)]
        )


def test_settings_are_ones_that_baton_takes(manifest: list[Object]) -> None:
    """The strict loader refuses unknown variables, so a pod with one would not start."""
    for workload in services(manifest).values():
        given = {name: value for name, value in environ(workload).items() if name.startswith("BATON_")}
        settings = load(None, given, {})
        assert settings.bus.user == component(workload)
        assert settings.bus.url.endswith("://baton-nats:4222")
        assert pod(workload)["enableServiceLinks"] is False  # they would make such variables


def test_pods_have_no_more_rights_than_they_need(manifest: list[Object]) -> None:
    for workload in workloads(manifest):
        spec = pod(workload)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            added = security["capabilities"].get("add", [])
            assert added == (["CHOWN"] if container["name"] == "own-shared-memory" else [])


def test_probes_and_the_time_to_drain(manifest: list[Object]) -> None:
    for workload in workloads(manifest):
        container = main_container(workload)
        assert "readinessProbe" in container and "livenessProbe" in container
        if workload["kind"] == "Deployment":
            alive = container["livenessProbe"]["exec"]["command"]
            assert alive == ["baton", "doctor", "--probe", "alive"]  # not the bus: its absence kills no pod
            grace_s = int(environ(workload)["BATON_WORKER_GRACE_MS"]) / 1_000
            assert pod(workload)["terminationGracePeriodSeconds"] >= grace_s + 10
            assert workload["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    gateway = main_container(services(manifest)["baton-gateway"])
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert gateway["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


def test_ports_agree(manifest: list[Object]) -> None:
    ports = {
        component(workload): {
            port["name"]: port["containerPort"] for port in main_container(workload)["ports"]
        }
        for workload in workloads(manifest)
        if "ports" in main_container(workload)
    }
    for workload in services(manifest).values():
        given = load(None, {k: v for k, v in environ(workload).items() if k.startswith("BATON_")}, {})
        match component(workload):
            case "gateway":
                assert ports["gateway"] == {"http": given.gateway.port} and given.gateway.host == "0.0.0.0"
            case "metrics":
                assert ports["metrics"] == {"metrics": given.metrics.port}
            case "kvstore":
                assert ports["kvstore"] == {"blocks": given.kvstore.tcp_port}
            case "prefill" | "decode" as role:
                assert ports[role] == {"blocks": given.worker.tcp_port}
    for service in kinds(manifest, "Service").values():
        labels = service["spec"]["selector"]
        reached = [one for one in workloads(manifest) if selects({"matchLabels": labels}, _labels(one))]
        assert len(reached) == 1
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports[component(reached[0])]
    for policy in kinds(manifest, "NetworkPolicy").values():
        for rule in policy["spec"].get("ingress", []):
            [open_port] = rule["ports"]
            reached = [
                one for one in workloads(manifest) if selects(policy["spec"]["podSelector"], _labels(one))
            ]
            assert reached
            assert all(open_port["port"] in ports[component(one)].values() for one in reached)


def _labels(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["metadata"]["labels"]
    return found


def test_who_may_reach_whom(manifest: list[Object]) -> None:
    allowed: dict[str, set[str]] = {}
    for policy in kinds(manifest, "NetworkPolicy").values():
        if "Ingress" not in policy["spec"]["policyTypes"]:
            continue
        for workload in workloads(manifest):
            if not selects(policy["spec"]["podSelector"], _labels(workload)):
                continue
            sources = allowed.setdefault(component(workload), set())
            for rule in policy["spec"].get("ingress", []):
                if "from" not in rule:
                    sources.add("anybody")
                for source in rule.get("from", []):
                    near = [
                        one for one in workloads(manifest) if selects(source["podSelector"], _labels(one))
                    ]
                    assert near
                    sources |= {component(one) for one in near}
    peers = {"prefill", "decode"}
    assert allowed == {
        "gateway": {"anybody"},
        "metrics": {"anybody"},
        "nats": set(SERVICES),
        "redis": {"kvstore"},
        "kvstore": peers,
        "prefill": {*peers, "kvstore"},
        "decode": {*peers, "kvstore"},
        **{closed: set() for closed in ("tokenizer", "router", "batch")},
    }


def test_each_service_has_its_own_password_and_no_other(manifest: list[Object]) -> None:
    for workload in services(manifest).values():
        keys = {
            one["valueFrom"]["secretKeyRef"]["key"]
            for one in main_container(workload)["env"]
            if one.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == "baton-auth"
        }
        role = component(workload)
        assert keys == ({role, "redis"} if role == "kvstore" else {role})
    nats = environ(kinds(manifest, "StatefulSet")["baton-nats"])
    assert set(nats) == {environment_name(user) for user in USERS}


def test_the_nats_configuration_is_that_of_the_protocol(manifest: list[Object]) -> None:
    passwords = {user: f"${environment_name(user)}" for user in USERS}
    files = ROOT / "deploy" / "chart" / "files"
    assert (files / "nats.conf").read_text() == server_config(passwords)
    tls = ServerTls("/tls/tls.crt", "/tls/tls.key")
    assert (files / "nats-tls.conf").read_text() == server_config(passwords, tls=tls)
    used = kinds(manifest, "ConfigMap")["baton-nats"]["data"]["nats.conf"]
    assert used.strip() in {(files / name).read_text().strip() for name in ("nats.conf", "nats-tls.conf")}


def test_models_aliases_and_gpus(full: list[Object]) -> None:
    small, large = (environ(services(full)[f"baton-tokenizer-{key}"]) for key in ("small", "large"))
    assert small["BATON_MODEL_NAME"] == "smollm2-135m-instruct"
    assert small["BATON_MODEL_ALIASES"] == "default,gpt-4o-mini"
    assert large["BATON_MODEL_NAME"].startswith("HuggingFaceTB/") and "BATON_MODEL_ALIASES" not in large
    for role in WORKERS:
        on_cpu, on_gpu = (services(full)[f"baton-{role}-{key}"] for key in ("small", "large"))
        assert "nvidia.com/gpu" not in main_container(on_cpu)["resources"]["limits"]
        assert main_container(on_gpu)["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert main_container(on_gpu)["image"].startswith("baton-cuda:")


def test_hand_off_by_tcp_or_by_memory(manifest: list[Object], full: list[Object]) -> None:
    for workload in services(manifest).values():
        if component(workload) not in WORKERS:
            continue
        [kv] = [volume for volume in pod(workload)["volumes"] if volume["name"] == "kv"]
        given = environ(workload)
        assert given["BATON_WORKER_TCP_HOST"] == "$(POD_IP)" and given["BATON_WORKER_SHM_DIR"] == "/kv"
        if manifest == full:
            assert given["BATON_WORKER_TRANSPORTS"] == "shm,tcp"
            assert kv["hostPath"]["path"].startswith("/dev/shm/")
            assert "podAffinity" in pod(workload)["affinity"]
        else:
            assert given["BATON_WORKER_TRANSPORTS"] == "tcp"
            assert kv["emptyDir"]["medium"] == "Memory"


def test_tls_is_on_everywhere_or_nowhere(full: list[Object]) -> None:
    for workload in services(full).values():
        given = environ(workload)
        assert given["BATON_BUS_URL"].startswith("tls://")
        assert given["BATON_WORKER_TLS_CA"] == given["BATON_BUS_TLS_CA"] == "/tls/ca.crt"
        mounts = {mount["mountPath"] for mount in main_container(workload)["volumeMounts"]}
        assert "/tls" in mounts
    assert environ(services(full)["baton-kvstore"])["BATON_KVSTORE_REDIS_URL"].startswith("rediss://")
    assert "--tls-port" in main_container(kinds(full, "StatefulSet")["baton-redis"])["args"]


def test_scaling_and_the_route_name_what_is_there(full: list[Object]) -> None:
    scaled = kinds(full, "ScaledObject")
    assert set(scaled) == {f"baton-{role}-{model}" for role in WORKERS for model in ("small", "large")}
    figures = (ROOT / "libs" / "baton" / "telemetry" / "metrics.py").read_text()
    for name, document in scaled.items():
        target = services(full)[document["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]  # KEDA's to say
        [trigger] = document["spec"]["triggers"]
        query = trigger["metadata"]["query"]
        assert f'role="{component(target)}"' in query
        assert json.dumps(environ(target)["BATON_MODEL_NAME"]) in query
        for metric in ("baton_requests_running", "baton_requests_waiting"):
            assert metric in query and metric in figures
        assert name.startswith(f"baton-{component(target)}")
    route = kinds(full, "HTTPRoute")["baton"]["spec"]
    [backend] = route["rules"][0]["backendRefs"]
    ports = [port["port"] for port in kinds(full, "Service")[backend["name"]]["spec"]["ports"]]
    assert backend["port"] in ports


def test_compose_says_the_same() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert set(SERVICES) <= set(compose["services"])
    dockerfile = (ROOT / "Dockerfile").read_text()
    for user in USERS:
        assert f"secrets-{user}" in compose["volumes"]
        assert f" {user} " in dockerfile.replace(
            ";", " "
        )  # its folder below /secrets takes the image's owner
    for service in SERVICES:
        part = compose["services"][service]
        assert part["command"] == ["serve", service]
        assert part["read_only"] is True and part["cap_drop"] == ["ALL"]
        given = {name: str(value) for name, value in part["environment"].items() if "${" not in str(value)}
        load(None, {**given, "BATON_CONFIG": ""}, {})
        secrets = [volume for volume in part["volumes"] if volume.startswith("secrets-")]
        assert secrets == [f"secrets-{service}:/secrets:ro"]
    users = {
        volume.removeprefix("secrets-") for volume in compose["volumes"] if volume.startswith("secrets-")
    }
    assert users == {*USERS, "nats", "redis"} and OPERATOR in users
