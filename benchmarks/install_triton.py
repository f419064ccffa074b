"""Install the real Triton Inference Server into a folder, for tests and measurements against ours.

    python benchmarks/install_triton.py .triton

The wheel nvidia-pytriton holds tritonserver 2.51.0 and its Python backend; no GPU is needed. The
folder gets a virtual environment, which Triton's Python backend uses, too, with numpy < 2 (with
numpy 2 this build reads wrong values), and a backend directory in the layout that tritonserver
wants. Done once; a second call finds it.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2", "tritonclient[grpc,http]", "msgspec")
STUB = "triton_python_backend_stub"
DONE = "installed"


def install(folder: Path, pip_arguments: list[str]) -> None:
    environment = folder / "venv"
    if not (environment / "bin" / "python").exists():
        venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *pip_arguments, *PACKAGES], check=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / f"python{version}" / "site-packages"
    server = packages / "pytriton" / "tritonserver"
    backend = folder / "backends" / "python"
    shutil.rmtree(backend, ignore_errors=True)
    shutil.copytree(server / "backends" / "python", backend)
    # One stub for each version of Python lies apart from the backend.
    shutil.copy(server / "python_backend_stubs" / version / STUB, backend)
    write_launcher(folder, server, packages)
    check_stub(backend / STUB, packages)
    (folder / DONE).touch()


def libraries(packages: Path) -> str:
    """LD_LIBRARY_PATH: Triton's own libraries, and libpython of the version that runs this."""
    own = packages / "nvidia_pytriton.libs"
    return f"{own}:{sysconfig.get_config_var('LIBDIR')}"


def write_launcher(folder: Path, server: Path, packages: Path) -> None:
    """`FOLDER/tritonserver`, which has its libraries and its Python."""
    launcher = folder / "tritonserver"
    launcher.write_text(
        "#!/bin/sh\n"
        f"export LD_LIBRARY_PATH='{libraries(packages)}'\n"
        f"export PATH='{folder / 'venv' / 'bin'}':\"$PATH\"\n"
        f"exec '{server / 'bin' / 'tritonserver'}' "
        f"--backend-directory='{folder / 'backends'}' \"$@\"\n"
    )
    launcher.chmod(0o755)


def check_stub(stub: Path, packages: Path) -> None:
    """Exit with a reason if the system lacks a library of it: mostly libpython."""
    command = ["env", f"LD_LIBRARY_PATH={libraries(packages)}", "ldd", str(stub)]
    dependencies = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    missing = [line.split()[0] for line in dependencies.splitlines() if "not found" in line]
    if missing:
        sys.exit(f"Triton's Python backend needs {', '.join(missing)}: install it, and try again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pip-args", default="", help="flags of pip, separated by blanks")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if (folder / DONE).exists():
        return
    if platform.machine() != "x86_64" or sys.platform != "linux":
        sys.exit("the wheel of tritonserver is for Linux on x86_64 only")
    install(folder, arguments.pip_args.split())


if __name__ == "__main__":
    main()
