#!/bin/bash
python3 - <<'END'
import json
from collections import defaultdict

with open("orders.jsonl") as file:
    orders = [json.loads(line) for line in file]
sums = defaultdict(float)
for order in orders:
    sums[order["customer"]] += order["price"] * order["quantity"]
summary = {
    "count": len(orders),
    "total": round(sum(sums.values()), 2),
    "by_customer": {name: round(value, 2) for name, value in sums.items()},
}
with open("summary.json", "w") as file:
    json.dump(summary, file)
END
