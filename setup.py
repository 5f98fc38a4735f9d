"""Puts the checkpoints that come with rfjax into its wheel; all else stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKPOINTS = ("shapes-tiny",)


class BuildWithCheckpoints(build_py):
    """An editable install takes them from the source tree."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for name in CHECKPOINTS:
            source, target = Path("checkpoints", name), Path(self.build_lib, "rfjax", "checkpoints", name)
            shutil.rmtree(target, ignore_errors=True)  # left by an earlier build
            shutil.copytree(source, target)


setup(cmdclass={"build_py": BuildWithCheckpoints})
