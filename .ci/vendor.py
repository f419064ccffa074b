"""Copies the console's libraries from npm's registry, in the versions of console/package-lock.json.

npm checks their hashes. SHA256SUMS has those of the files as they are served.
"""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ROOT / "console" / "node_modules"
VENDOR = ROOT / "src/loraplex/frontends/console/static/vendor"
FILES = {
    "preact.mjs": "preact/dist/preact.mjs",
    "hooks.mjs": "preact/hooks/dist/hooks.mjs",
    "htm.mjs": "htm/dist/htm.mjs",
    "marked.mjs": "marked/lib/marked.esm.js",
    "uplot.mjs": "uplot/dist/uPlot.iife.min.js",
    "uplot.css": "uplot/dist/uPlot.min.css",
}
"""Path in the packages by name."""
IMPORTS = {"hooks.mjs": ('from"preact"', 'from"./preact.mjs"')}
"""A browser knows no package names."""
SUFFIXES = {"uplot.mjs": "\nexport default uPlot;\n"}
"""Only the build that is no module is published without blanks."""


def served(name: str) -> bytes:
    """Return a library's file as it is served."""
    text = (PACKAGES / FILES[name]).read_text()
    text = "".join(
        line for line in text.splitlines(keepends=True) if "sourceMappingURL" not in line
    )
    old, new = IMPORTS.get(name, ("", ""))
    if old:
        assert text.count(old) == 1, f"{name} does not have {old} once"
        text = text.replace(old, new)
    return (text + SUFFIXES.get(name, "")).encode()


def main() -> None:
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit"], cwd=PACKAGES.parent, check=True)
    VENDOR.mkdir(parents=True, exist_ok=True)
    contents = {name: served(name) for name in FILES}
    licences = [
        f"{package}\n\n{(PACKAGES / package / 'LICENSE').read_text()}"
        for package in sorted({path.split("/")[0] for path in FILES.values()})
    ]
    contents["LICENSES.txt"] = f"\n{'-' * 72}\n".join(licences).encode()
    sums = ""
    for name, content in sorted(contents.items()):
        (VENDOR / name).write_bytes(content)
        sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
    (VENDOR / "SHA256SUMS").write_text(sums)


if __name__ == "__main__":
    main()
