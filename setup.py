"""Adds to a wheel what pyproject.toml cannot say: the compiled CPU kernels, where there is a compiler."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from baton_kernels.cpu import build as kernels


class BuildWithKernels(build_py):
    """Copies the packages, then compiles; an editable install compiles when it first needs to."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if kernels.compiler() is None:
            print("warning: no C++ compiler, so the wheel holds no CPU kernels")
            return
        kernels.ship(Path(self.build_lib) / "baton_kernels" / "cpu" / "compiled")


class PlatformWheel(bdist_wheel):
    """Named for this platform when it holds kernels, and for any Python 3, as ctypes calls them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = kernels.compiler() is None

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
