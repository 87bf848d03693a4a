import sys

first, operator, second = sys.argv[1:]
if operator == "+":
    print(int(first) + int(second))
