"""Spack's recipe; its folder goes into the ``packages`` of a repository of yours."""
# ruff: noqa: F403, F405 - recipes of Spack begin so

from spack.package import *


class Slurmft(PythonPackage):
    """Keeps PyTorch training and inference going on Slurm, whatever happens to processes, nodes or the queue."""

    license("Apache-2.0")

    version("0.1.0")

    variant("train", default=True, description="With torch, for sessions and checkpoints")
    variant("inference", default=False, description="With what endpoints and batches need")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-submitit@1.5.4:", type=("build", "run"))
    depends_on("py-cloudpickle@3.0:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:", type=("build", "run"))
    depends_on("py-filelock@3.30:", type=("build", "run"))
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-pydantic@2.7:", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-tenacity@9.0:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
    depends_on("py-prometheus-client@0.20:", type=("build", "run"))
    depends_on("py-torch@2.6:", type=("build", "run"), when="+train")
    depends_on("py-numpy@1.26:", type=("build", "run"), when="+train")
    depends_on("py-numpy@1.26:", type=("build", "run"), when="+inference")
    depends_on("py-aiohttp@3.14.1:", type=("build", "run"), when="+inference")
    depends_on("py-zstandard@0.22:", type=("build", "run"), when="+inference")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def starts(self) -> None:
        Executable(self.prefix.bin.slurmft)("--help")
