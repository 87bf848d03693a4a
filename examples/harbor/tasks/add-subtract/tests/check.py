import subprocess
import sys


def calc(*words):
    done = subprocess.run([sys.executable, "calc.py", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


assert calc("2", "+", "3") == (0, "5", "")
assert calc("2", "-", "3") == (0, "-1", "")
assert calc("4", "x", "3") == (0, "12", "")
assert calc("4", "/", "3") == (2, "", "unknown operator")
