"""Folders that are named: of this machine, or refused by name."""

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_address(path: str) -> bool:
    """Whether ``path`` is an address, as of a bucket, which would be taken for a folder called "s3:"."""
    return _ADDRESS.match(path) is not None


def address_error(name: str, path: str) -> str | None:
    """What is wrong with ``path``, the value of ``name``, if it is an address; None if it is not.

    One slash is enough: some shells and programs drop the other.
    """
    if not is_address(path):
        return None
    scheme, _, rest = path.partition(":")
    local = f"/{rest.lstrip('/')}" if scheme == "file" else "the path where it is mounted, or copy it here"
    return f"{name}={path}: is an address, not a folder of this machine; write {local}"
