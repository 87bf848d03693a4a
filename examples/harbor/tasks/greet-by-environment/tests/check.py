import os
import subprocess
import sys

name = os.environ["EXPECTED_NAME"]
assert os.environ["GREETING"] == "Good morning"
assert os.environ["APP_STAGE"] == "test"  # of the image


def greet(**variables):
    argv = [sys.executable, "greet.py", name]
    return subprocess.run(argv, env=variables, capture_output=True, text=True, check=True).stdout


assert greet(GREETING="Moin") == "Moin, Ada!\n"
assert greet() == "Hello, Ada!\n"
with open("greeting.txt") as file:
    assert file.read().strip() == "Good morning"
