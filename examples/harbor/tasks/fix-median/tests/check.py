import sys

sys.path.insert(0, "/app")
from stats import median

assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5
numbers = [9, 1, 5]
assert median(numbers) == 5
assert numbers == [9, 1, 5]
try:
    median([])
except ValueError:
    pass
else:
    raise AssertionError("no ValueError")
