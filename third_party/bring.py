#!/usr/bin/env python3
"""Brings the pinned third-party packages into third_party/.local, which git ignores.

    python3 third_party/bring.py                  tools, cutlass, and cuda where no toolkit is installed
    python3 third_party/bring.py fa3              these groups, whatever is installed
    python3 third_party/bring.py --list           what is pinned, and what is already there

A group is a file requirements-GROUP.txt. pip installs it with `--require-hashes --no-deps` into
.local/GROUP and nowhere else: no virtual environment is needed (Debian ships Python without it) and the
system's packages stay as they are. A group already there in the pinned versions is left alone.

The group fa3 (the feature `fa3`; only brought when named) is source code: what pip installs there is the
client that downloads it, and sources-fa3.txt pins it. The C++ files end up in .local/fa3/hopper.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time

HERE = pathlib.Path(__file__).resolve().parent
LOCAL = HERE / ".local"
GROUPS = ("tools", "cutlass", "cuda", "fa3")
REQUIRED_CUDART = 13000  # CUDART_VERSION; the same bound stands in build_support/locate.rs


def say(text):
    print(f"third_party: {text}", flush=True)


def requirements(group):
    return HERE / f"requirements-{group}.txt"


def sources(group):
    return HERE / f"sources-{group}.txt"


def pin_files(group):
    return [file for file in (requirements(group), sources(group)) if file.is_file()]


def digest(group):
    return hashlib.sha256(b"".join(file.read_bytes() for file in pin_files(group))).hexdigest()


def is_current(group):
    stamp = LOCAL / group / ".requirements-sha256"
    return stamp.is_file() and stamp.read_text().strip() == digest(group)


def toolkit_version(root):
    """CUDART_VERSION of a toolkit that can compile, or 0."""
    header = root / "include" / "cuda_runtime_api.h"
    if not (root / "bin" / "nvcc").is_file() or not header.is_file():
        return 0
    found = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"), re.M)
    return int(found.group(1)) if found else 0


def installed_toolkit():
    """The first toolkit on this machine that is new enough, in build_support/locate.rs's order."""
    places = [os.environ.get(name) for name in ("MUSE_SPARK_CUDA_ROOT", "CUDA_HOME", "CUDA_PATH")]
    places.append("/usr/local/cuda")
    nvcc = shutil.which("nvcc")
    if nvcc:
        places.append(str(pathlib.Path(nvcc).resolve().parent.parent))
    for place in places:
        if place and toolkit_version(pathlib.Path(place)) >= REQUIRED_CUDART:
            return place
    return None


def pip_command():
    """pip of this Python, or else of a small virtual environment made for it."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run(own + ["--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
        return own
    venv = LOCAL / "pip"
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode == 0:
        return [str(venv / "bin" / "python"), "-m", "pip"]
    sys.exit(
        "third_party: this Python has neither pip nor venv, so nothing can be brought.\n"
        f"  looked at: {sys.executable} -m pip; {sys.executable} -m venv\n"
        "  on Debian and Ubuntu: apt-get install python3-pip"
    )


def install(group):
    target = LOCAL / group
    fresh = LOCAL / f"{group}.new"
    for folder in (fresh, target):
        shutil.rmtree(folder, ignore_errors=True)
    names = ", ".join(f"{name} {version}" for name, version, _ in pins(group))
    say(f"{group}: bringing {names}")
    began = time.monotonic()
    command = pip_command() + [
        "install", "--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile",
        "--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore",
        "--progress-bar", "on" if sys.stdout.isatty() else "off",
        "--target", str(fresh), "--requirement", str(requirements(group)),
    ]
    # --target is refused together with a `user` or `prefix` default from the environment.
    environment = {key: value for key, value in os.environ.items() if key not in ("PIP_USER", "PIP_PREFIX", "PIP_TARGET")}
    if subprocess.run(command, env=environment).returncode != 0:
        shutil.rmtree(fresh, ignore_errors=True)
        sys.exit(f"third_party: {group} could not be brought; pip's own message is above")
    if group == "cuda":
        complete_toolkit(fresh / "nvidia" / "cu13")
    if group == "fa3":
        fetch_sources(group, fresh)
    fresh.rename(target)
    # Last, so that an interrupted run is started over.
    (target / ".requirements-sha256").write_text(digest(group) + "\n")
    say(f"{group}: done in {time.monotonic() - began:.0f} s")


def complete_toolkit(root):
    """The two links that the wheels lack and CMake's FindCUDAToolkit asks for."""
    for link, points_to in ((root / "lib64", "lib"), (root / "lib" / "libcudart.so", "libcudart.so.13")):
        if not link.exists():
            link.symlink_to(points_to)


def fetch_sources(group, folder):
    """Downloads a group's source package by the client in `folder`, checks it, and leaves its C++ files."""
    (name, version, sha256), = read_pins(sources(group))
    archive = folder / f"{name}-{version}.tar.gz"
    command = [sys.executable, "-m", "unearth", f"{name}=={version}", "--no-binary", "--download", str(folder)]
    # Found there and nowhere else: the folder is no site-packages.
    environment = dict(os.environ, PYTHONPATH=str(folder))
    if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode != 0 or not archive.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(f"third_party: {name} {version} could not be downloaded; the client's own message is above")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(f"third_party: {archive.name} has SHA-256 {found}, not the pinned {sha256}: thrown away")
    root = f"{name}-{version}/"
    hopper = root + "third_party/flash-attention/hopper/"
    (folder / "hopper").mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            name = pathlib.PurePosixPath(member.name).name
            if member.name == root + "LICENSE":
                (folder / name).write_bytes(packed.extractfile(member).read())
            elif member.name == hopper + name and name.endswith((".h", ".hpp", ".cu")):
                (folder / "hopper" / name).write_bytes(packed.extractfile(member).read())
    # Neither the package nor the client is needed any more.
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "hopper":
            shutil.rmtree(entry)
        elif not entry.is_dir() and entry.name != "LICENSE":
            entry.unlink()


def read_pins(file):
    """(package, version, sha256) of each line."""
    pattern = re.compile(r"^([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})$", re.M)
    return pattern.findall(file.read_text())


def pins(group):
    return [pin for file in pin_files(group) for pin in read_pins(file)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--list", action="store_true", help="only say what is pinned and what is there")
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if options.list:
        for group in GROUPS:
            for name, version, sha256 in pins(group):
                print(f"{group:8} {name:22} {version:9} {'here' if is_current(group) else 'absent':7} {sha256}")
        return
    groups = options.groups
    if not groups:
        groups = ["tools", "cutlass"]
        if os.environ.get("MUSE_SPARK_CUTLASS_DIR"):
            say(f"cutlass: MUSE_SPARK_CUTLASS_DIR={os.environ['MUSE_SPARK_CUTLASS_DIR']} is used")
            groups.remove("cutlass")
        toolkit = installed_toolkit()
        if toolkit:
            say(f"cuda: the toolkit in {toolkit} is used")
        else:
            groups.append("cuda")
    LOCAL.mkdir(exist_ok=True)
    for group in groups:
        if is_current(group):
            say(f"{group}: already here")
        else:
            install(group)


if __name__ == "__main__":
    main()
