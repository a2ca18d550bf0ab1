"""The part of the packaging that pyproject.toml cannot say: a start-up file in site-packages, and compiled kernels.

Our files lie in folders that belong to SGLang. Where an SGLang from a source tree (``pip install -e``) is used, Python
would take those folders for all of SGLang; ``sglang_dualdecoder.keep_sglang_importable`` prevents it.

After ``make kernels`` a wheel carries the library and is for this platform; otherwise it is for all, and the kernels
are compiled where they are first used.
"""

import glob
import os
import re
import sysconfig

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = os.path.join("sgl-kernel", "csrc", "sparse_kv")
STARTUP = "sglang_dualdecoder.pth"


class BuildWithStartup(build_py):
    """Puts the start-up file where a wheel carries it into site-packages."""

    def run(self):
        super().run()
        self.copy_file(os.path.join("python", STARTUP), self._target())

    def get_outputs(self, include_bytecode=True):
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, self._target()]

    def _target(self):
        # An editable install leaves modules where they are, and takes other files from the folder it installs from.
        root = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        return os.path.join(root, STARTUP)


class WheelWithKernels(bdist_wheel):
    """Names the platform, and no version of Python, when there is a compiled library."""

    def get_tag(self):
        if not glob.glob(os.path.join(KERNELS, "*.so")):
            return super().get_tag()
        return "py3", "none", re.sub(r"\W", "_", sysconfig.get_platform())


setup(cmdclass={"build_py": BuildWithStartup, "bdist_wheel": WheelWithKernels})
