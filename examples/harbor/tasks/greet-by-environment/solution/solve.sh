#!/bin/bash
cat > greet.py <<END
# By $AUTHOR.
import os
import sys

print(f"{os.environ.get('GREETING', 'Hello')}, {sys.argv[1]}!")
END
printf '%s\n' "$GREETING" > greeting.txt
