"""List the packages. setup.cfg has the other metadata; it can't add a package to `find:`."""

from setuptools import find_packages, setup

# The wheel has recipes/ inside the package, as colograd/recipes (package_dir in setup.cfg).
setup(packages=[*find_packages(include=["colograd*"]), "colograd.recipes"])
