#!/bin/bash
# Two of the three parts.
echo '{"count": 4, "total": 46.99}' > summary.json
