"The package, described by settings.ini; the top-level data folder ships inside it as trace_nb.data."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
config = ConfigParser(delimiters=["="], interpolation=None)
config.read(root/"settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

def lines(key):
    "The non-empty lines of a multi-line setting."
    return [line.strip() for line in settings[key].splitlines() if line.strip()]

suffix = "_requirements"
extras = {key.removesuffix(suffix): lines(key) for key in settings if key.endswith(suffix)}
extras["all"] = sorted({requirement for extra in extras.values() for requirement in extra})

setup(
    name=settings["name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(root/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=settings["keywords"],
    author=settings["author"],
    license_expression=settings["license"],
    license_files=["LICENSE"],
    classifiers=lines("classifiers"),
    python_requires=f">={settings['min_python']}",
    packages=find_packages(include=["trace_nb", "trace_nb.*"]) + ["trace_nb.data"],
    package_dir={"trace_nb.data": "data"},
    package_data={"trace_nb.data": ["*", "**/*"]},
    install_requires=lines("requirements"),
    extras_require=extras,
    entry_points={"console_scripts": lines("console_scripts"), "nbdev": ["trace_nb=trace_nb._modidx:d"]},
)
