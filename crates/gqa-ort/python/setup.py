"""A wheel with one library, for every Python: `cargo xtask wheel` says of which version and for which systems."""

import os

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", os.environ["GQA_PLATFORM"]


setup(version=os.environ["GQA_VERSION"], cmdclass={"bdist_wheel": Wheel})
