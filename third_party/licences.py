#!/usr/bin/env python3
"""Writes docs/licences.md: what is linked into the library and the program, and under which licence.

    python3 third_party/licences.py

Crates from `cargo metadata` (x86-64 Linux, every feature; build and test dependencies are left out), native code
from third_party/README.md.
"""

import json
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD = """# Licences

The crate itself: MIT or Apache-2.0, at your choice (`LICENSE-MIT`, `LICENSE-APACHE`). What is linked with it, written by
`third_party/licences.py`; `with` names the features that bring a crate (none: always).

## Native code

| what | licence |
|---|---|
| CUDA runtime, static (feature `cuda`) | NVIDIA CUDA Toolkit EULA (redistributable part) |
| CUTLASS and CuTe headers (feature `cuda`) | BSD-3-Clause |
| NVTX header (feature `cuda`) | Apache-2.0 with LLVM exception |
| FlashAttention-3 (feature `fa3`) | BSD-3-Clause |
"""


def metadata(*features):
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]
    done = subprocess.run(command + list(features), cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def linked(meta):
    """Packages that normal dependencies reach, but for procedural macros' own."""
    nodes = {node["id"]: node for node in meta["resolve"]["nodes"]}
    packages = {package["id"]: package for package in meta["packages"]}
    found, open_ = set(), [meta["resolve"]["root"]]
    while open_:
        at = open_.pop()
        if at in found or any("proc-macro" in target["kind"] for target in packages[at]["targets"]):
            continue
        found.add(at)
        open_ += [d["pkg"] for d in nodes[at]["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"])]
    found.discard(meta["resolve"]["root"])
    return {(packages[i]["name"], packages[i]["version"], packages[i]["license"] or "see the crate") for i in found}


def main():
    toml = (ROOT / "Cargo.toml").read_text()
    section = re.search(r"^\[features\]\n(.*?)^\[", toml, re.M | re.S).group(1)
    features = [name for name in re.findall(r"^([a-z0-9_-]+) *=", section, re.M) if name != "default"]
    base = linked(metadata("--no-default-features"))
    with_ = {}
    for feature in features:
        for package in linked(metadata("--no-default-features", "--features", feature)) - base:
            with_.setdefault(package, []).append(feature)
    lines = [f"| {n} | {v} | {l} | |" for n, v, l in base]
    lines += [f"| {n} | {v} | {l} | {', '.join(f)} |" for (n, v, l), f in with_.items()]
    table = "\n## Crates\n\n| crate | version | licence | with |\n|---|---|---|---|\n" + "\n".join(sorted(lines)) + "\n"
    (ROOT / "docs" / "licences.md").write_text(HEAD + table)
    print(f"docs/licences.md: {len(lines)} crates")


if __name__ == "__main__":
    main()
