"""Execute the tutorials of examples/ and copy their pictures to docs/images/tutorials.

python tools/tutorials.py [NUMBER ...]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/images/tutorials"


def main(numbers: list[str]) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for script in sorted((ROOT / "examples").glob("[0-9]*.py")):
        if numbers and script.name.partition("_")[0] not in numbers:
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, str(script), out], check=True, cwd=out, env=environment)
            for picture in Path(out).glob("*.png"):
                shutil.copy(picture, PICTURES)
        print(f"{script.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
