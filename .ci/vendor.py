"""Bundles the console's libraries, in the versions of console/package-lock.json.

npm checks their hashes. SHA256SUMS has those of the files as they are served. Only what the console
uses of a library is in its file: of marked that is the lexer.
"""

import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSOLE = ROOT / "console"
PACKAGES = CONSOLE / "node_modules"
VENDOR = ROOT / "src/loraplex/frontends/console/static/vendor"
LIBRARIES = {"preact": ("preact", "htm"), "marked": ("marked",)}
"""Packages of each file. The file `console/NAME.js` names what it exports of them."""


def write_sources_of_marked() -> None:
    """Take marked's sources from its source map: its published file cannot be taken apart."""
    sources = json.loads((PACKAGES / "marked/lib/marked.esm.js.map").read_text())
    for path, content in zip(sources["sources"], sources["sourcesContent"], strict=True):
        target = PACKAGES / "marked/lib" / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(content)


def bundle(name: str) -> bytes:
    """Return a file as it is served."""
    versions = ", ".join(
        f"{package} {json.loads((PACKAGES / package / 'package.json').read_text())['version']}"
        for package in LIBRARIES[name]
    )
    esbuild = (
        PACKAGES / ".bin/esbuild",
        f"{name}.js",
        "--bundle",
        "--minify",
        "--format=esm",
        "--charset=utf8",
    )
    banner = f"--banner:js=/* {versions}. Licences: LICENSES.txt */"
    run = subprocess.run([*esbuild, banner], cwd=CONSOLE, check=True, stdout=subprocess.PIPE)
    return run.stdout


def main() -> None:
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit"], cwd=CONSOLE, check=True)
    write_sources_of_marked()
    contents = {f"{name}.mjs": bundle(name) for name in LIBRARIES}
    licences = [
        f"{package}\n\n{(PACKAGES / package / 'LICENSE').read_text()}"
        for package in sorted({package for some in LIBRARIES.values() for package in some})
    ]
    contents["LICENSES.txt"] = f"\n{'-' * 72}\n".join(licences).encode()
    for path in VENDOR.iterdir():
        path.unlink()
    sums = ""
    for name, content in sorted(contents.items()):
        (VENDOR / name).write_bytes(content)
        sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
    (VENDOR / "SHA256SUMS").write_text(sums)


if __name__ == "__main__":
    main()
