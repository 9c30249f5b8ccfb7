"""Compare all shipped machine code, and what a launch of it takes, with what was frozen: `python guard/machine_code.py`."""

import hashlib
import sys
from dataclasses import asdict
from typing import Any

import frozen

from flashtune.core.code.binaries import Manifest
from flashtune.core.code.shipped import PACKAGE, folder_of, manifest_in, shipped_index
from flashtune.core.records.results import PROVIDERS
from flashtune.db.library import Library, shipped_path
from flashtune.templates import BITS
from flashtune.tuner.publish.generated import arrange, present_archive


def current(new: bool = False) -> dict[str, Any]:
    """The digests of every kernel that the shipped rows and their fallbacks name, for both 16-bit types where code for both is shipped."""
    found: dict[str, Any] = {}
    folder, index = folder_of(PACKAGE), shipped_index(PACKAGE)
    archives = {arch: present_archive(folder, index, arch) for arch in index.archives}
    records = [record for record in Library.of(shipped_path()).records(bits=BITS) if record.outcome.template not in PROVIDERS]
    for one in arrange(records):
        for variant in one.variants:
            manifest = manifest_in(archives.get(one.kernel.arch), index, variant.id, one.kernel.arch)
            name = f"{one.kernel.arch} {variant.template} {variant.spec.label()} {variant.config.label()}"
            assert name not in found, name
            if manifest is not None:
                for binary in manifest.binaries:
                    # Raises where the code isn't that.
                    manifest.code(binary)
                found[name] = {"code": [binary.sha256 for binary in manifest.binaries], "launch": launch_digest(manifest)}
    return found


def launch_digest(manifest: Manifest) -> str:
    """SHA-256 of all that a launch takes beside the code: parameters, conditions, threads, shared memory."""
    facts = [{name: value for name, value in asdict(binary).items() if name not in ("sha256", "file")} for binary in manifest.binaries]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(frozen.main("code", __doc__, current))
