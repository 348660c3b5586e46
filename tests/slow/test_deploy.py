"""What deploy/ and .github/ hold: each file by the judge of its kind, since no Docker, cluster or runner is here."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mediator.parts import installed_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
CHART = DEPLOY / "helm" / "mediator"
WATCHED = "serviceMonitor.enabled=true,prometheusRule.enabled=true,networkPolicy.enabled=true"
PIPELINE = "pipeline.enabled=true,pipeline.lakeClaim=lake"
SHARED = ["--set", f"replicas=3,existingSecret=keys,ingress.enabled=true,{WATCHED},{PIPELINE}"]
OF_OPERATOR = {"ServiceMonitor", "PrometheusRule"}
"""Kinds that the Prometheus operator brings."""


def run(tool: str, *arguments: str | Path) -> str:
    """Run a program of this environment, which must succeed, and return what it prints."""
    done = subprocess.run(
        [Path(sys.executable).with_name(tool), *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def secret(name: str) -> str:
    """Return what .env.example asks for: a key in base64, or a password in hex."""
    digest = hashlib.sha256(name.encode())
    return base64.b64encode(digest.digest()).decode() if name.endswith("_KEY") else digest.hexdigest()


def compose() -> dict[str, Any]:
    """Return the compose file with every variable filled in, in the ways of compose that it uses."""
    text = (COMPOSE / "compose.yaml").read_text()
    filled = re.sub(r"\$\{(\w+)(:\?[^}]*)?\}", lambda found: secret(found[1]), text)
    composed: dict[str, Any] = yaml.safe_load(filled)
    return composed


@pytest.mark.parametrize("dockerfile", [DEPLOY / "Dockerfile", ROOT / ".devcontainer" / "Dockerfile"])
def test_images_are_built_as_hadolint_advises(dockerfile):
    run("hadolint", "--failure-threshold", "info", dockerfile)


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.dependabot", ".github/dependabot.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_files_of_the_host_fit_their_schemas(schema, files):
    run("check-jsonschema", "--builtin-schema", schema, *ROOT.glob(files))


def test_the_compose_file_fits_its_specification():
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE / "compose.yaml")


def test_every_variable_of_compose_stands_in_the_example():
    used = set(re.findall(r"\$\{(\w+)", (COMPOSE / "compose.yaml").read_text()))
    listed = set(re.findall(r"^(\w+)=", (COMPOSE / ".env.example").read_text(), re.MULTILINE))
    assert used == listed


def test_every_file_that_compose_mounts_is_there():
    services = compose()["services"].values()
    sources = [volume.split(":")[0] for service in services for volume in service.get("volumes", ())]
    files = [source for source in sources if source.startswith(".")]
    assert len(files) >= 7
    assert [source for source in files if not (COMPOSE / source).is_file()] == []


def test_the_service_takes_the_settings_of_compose(monkeypatch):
    """Each instance differs by its name alone, and nobody but operators and tokens gets in."""
    instances = {name: service for name, service in compose()["services"].items() if name.startswith("mediator-")}
    assert len(instances) == 3
    for name, service in instances.items():
        for variable, value in service["environment"].items():
            monkeypatch.setenv(variable, value)
        settings = installed_settings().load(COMPOSE / "mediator.toml")
        assert settings.instance == name
        assert settings.http.port == 8080
        assert not settings.http_local
        assert settings.nats_url is not None
        assert settings.nats_url.get_secret_value().count("nats-") == 3
        assert settings.database_url is not None


def test_every_container_runs_with_few_rights():
    for name, service in compose()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_only_what_wallets_and_agents_use_is_published():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    published = set(values["ingress"]["paths"])
    assert published & {"/", "/console", "/api", "/api/v1", "/metrics", "/openapi.json"} == set()
    rendered = yaml.safe_load_all(run("helm", "template", "mail", CHART, *SHARED))
    (ingress,) = [item for item in rendered if item and item["kind"] == "Ingress"]
    assert {path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]} == published
    [proxied] = re.findall(r"@public path (.+)", (COMPOSE / "Caddyfile").read_text())
    assert {path.removesuffix("/*") for path in proxied.split()} == published
    ports = {name: service["ports"] for name, service in compose()["services"].items() if "ports" in service}
    assert {port for port in ports.pop("proxy") if not port.startswith("127.0.0.1:")} == {"80:80", "443:443"}
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)


def test_the_image_has_no_secrets_of_the_folder():
    assert {"**/.env", "**/*.env"} <= set((ROOT / ".dockerignore").read_text().splitlines())


def test_nats_server_takes_its_configuration():
    passwords = {"NATS_PASSWORD": "one", "AGENT_PASSWORD": "two", "ROUTE_PASSWORD": "three"}
    checked = subprocess.run(
        [Path(sys.executable).with_name("nats-server"), "-t", "--config", COMPOSE / "nats.conf"],
        env={**os.environ, **passwords},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def rendered(*values: str) -> dict[str, Any]:
    """Render the chart, and return what it makes by kind; where there are several, the last."""
    options = ["--set", ",".join(values)] if values else []
    items = yaml.safe_load_all(run("helm", "template", "mail", CHART, *options))
    return {item["kind"]: item for item in items if item}


def test_nothing_needs_an_operator_unless_asked_for():
    assert {*rendered()} & {*OF_OPERATOR, "NetworkPolicy", "Ingress"} == set()


def test_the_chart_brings_the_alerts():
    rule = rendered("prometheusRule.enabled=true", "prometheusRule.labels.release=prometheus")["PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((ROOT / "docs" / "alerts.rules.yml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_the_chart_is_scraped_in_the_job_of_the_alerts():
    made = rendered("serviceMonitor.enabled=true")
    label = made["ServiceMonitor"]["spec"]["jobLabel"]
    service = made["Service"]
    assert service["metadata"]["labels"][label] == "mediator"
    assert made["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(("replicas", "ports"), [(1, ["nats", "http"]), (3, ["http"])])
def test_a_policy_lets_in_only_who_is_named(replicas, ports):
    made = rendered(f"replicas={replicas}", "existingSecret=keys", "networkPolicy.enabled=true")
    policy = made["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == ports
    # A rule without peers would let in everybody.
    assert all(rule["from"] == [{"podSelector": {}}] for rule in policy["ingress"])
    pods = made["StatefulSet"]["spec"]["template"]["metadata"]
    assert policy["podSelector"]["matchLabels"].items() <= pods["labels"].items()


def pods_of_pipeline(*values: str) -> list[dict[str, Any]]:
    """Return the specifications of the pods that the chart's jobs have, one for each instance."""
    rendered = yaml.safe_load_all(run("helm", "template", "mail", CHART, "--set", ",".join(values)))
    jobs = [item["spec"]["jobTemplate"]["spec"] for item in rendered if item and item["kind"] == "CronJob"]
    return [job["template"]["spec"] for job in jobs]


def commands_of(pod: dict[str, Any]) -> list[list[str]]:
    """Return what a pod runs, one after the other."""
    return [container["args"] for container in (*pod.get("initContainers", ()), *pod["containers"])]


def test_the_pipeline_runs_where_the_volume_of_the_instance_is():
    made = rendered("pipeline.enabled=true", r"pipeline.conf.spark\.driver\.memory=3g")
    (pod,) = pods_of_pipeline("pipeline.enabled=true", r"pipeline.conf.spark\.driver\.memory=3g")
    assert [words[1] for words in commands_of(pod)] == ["ingest", "archive", "report"]
    assert all("--lake" not in words for words in commands_of(pod))
    (claims,) = made["StatefulSet"]["spec"]["volumeClaimTemplates"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "data"]
    assert volume["persistentVolumeClaim"]["claimName"] == f"{claims['metadata']['name']}-mail-0"
    (beside,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert beside["labelSelector"]["matchLabels"] == {"statefulset.kubernetes.io/pod-name": "mail-0"}
    # Neither the Service nor the policy may take a job for an instance.
    labels = made["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert not made["Service"]["spec"]["selector"].items() <= labels.items()


def test_each_instance_has_its_journal_taken_in():
    pods = pods_of_pipeline("replicas=3", "existingSecret=keys", PIPELINE)
    assert [[words[1] for words in commands_of(pod)] for pod in pods] == [
        ["ingest", "archive", "report"],
        ["ingest"],
        ["ingest"],
    ]
    for pod in pods:
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert "/lake/mediator" in container["args"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]


def test_the_commands_of_the_chart_are_those_of_the_program(tmp_path):
    """Each is understood, up to the database or the lake, which are not there."""
    for words in commands_of(pods_of_pipeline("pipeline.enabled=true", PIPELINE)[0]):
        config = words.index("--config") + 1
        words[config] = str(tmp_path / "mediator.toml")
        (tmp_path / "mediator.toml").write_text(yaml.safe_load((CHART / "values.yaml").read_text())["settings"])
        words[words.index("--lake") + 1] = "/dev/null"
        done = subprocess.run(
            [sys.executable, "-m", "mediator", *words, "--data-dir", tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "there is no mediator.db" in done.stderr or "/dev/null: expected a folder" in done.stderr


def test_the_application_fits_the_operators_schema():
    from kubeflow_spark_api.models import SparkV1beta2SparkApplication

    given = yaml.safe_load((DEPLOY / "spark" / "application.yaml").read_text())
    # What the schema does not know is not read.
    read = SparkV1beta2SparkApplication.from_dict(given)
    assert read is not None
    assert read.to_dict() == given
    spec = given["spec"]
    version = re.search(r'"pyspark\[connect\]==(.+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    assert spec["sparkVersion"] == version[1]
    program = spec["mainApplicationFile"].removeprefix("local:///opt/spark/")
    assert (DEPLOY / "spark" / program).is_file()
    for part in ("driver", "executor"):
        # Both see the lake under the same path.
        assert {"name": "lake", "mountPath": "/lake"} in spec[part]["volumeMounts"]
        assert spec[part]["podSecurityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("options", [[], SHARED], ids=["one instance", "three that share"])
def test_the_chart_renders_what_kubernetes_takes(options, tmp_path):
    run("helm", "lint", "--strict", CHART, *options)
    rendered = run("helm", "template", "mail", CHART, *options)
    known = [item for item in yaml.safe_load_all(rendered) if item and item["kind"] not in OF_OPERATOR]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(known))
    run("kubernetes-validate", "--strict", tmp_path / "all.yaml")
    (pods,) = [item["spec"]["template"]["spec"] for item in known if item["kind"] == "StatefulSet"]
    assert pods["securityContext"]["runAsNonRoot"]
    assert pods["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("replicas=3", "existingSecret"),
        ("replicas=0", "replicas"),
        ("storage.size=lots", "size"),
        ("replica=1", "replica"),
        ("networkPolicy.httpFrom=null", "httpFrom"),
        ("networkPolicy.natsFrom=null", "natsFrom"),
        ("replicas=2,existingSecret=keys,pipeline.enabled=true", "pipeline.lakeClaim"),
        ("pipeline.schedule=hourly", "schedule"),
        ("pipeline.conf.memory=3g", "memory"),
    ],
)
def test_the_chart_says_what_is_wrong_with_values(option, said):
    with pytest.raises(AssertionError, match=said):
        run("helm", "template", "mail", CHART, "--set", option)


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert chart["version"] == chart["appVersion"] == version[1]
    assert f"agent-mediator:{version[1]}" in (COMPOSE / "compose.yaml").read_text()
    assert f"agent-mediator-pipeline:{version[1]}" in (DEPLOY / "spark" / "application.yaml").read_text()
    assert json.loads((CHART / "values.schema.json").read_text())["additionalProperties"] is False
