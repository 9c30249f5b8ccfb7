"""The archive of flashtune's machine code for sm_90a; flashtune finds it in this folder, and runs nothing of this package."""

from pathlib import Path

ARCHIVE = Path(__file__).with_name("sm90.kernels")
