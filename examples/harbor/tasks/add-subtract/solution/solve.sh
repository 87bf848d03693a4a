#!/bin/bash
cat > calc.py <<'END'
import sys

OPERATORS = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}

first, operator, second = sys.argv[1:]
if operator not in OPERATORS:
    sys.exit(print("unknown operator", file=sys.stderr) or 2)
print(OPERATORS[operator](int(first), int(second)))
END
