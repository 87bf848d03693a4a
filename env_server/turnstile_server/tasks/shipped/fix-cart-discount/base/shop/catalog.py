"""What can be bought."""

PRICES = {"apple": 50, "bread": 250, "coffee": 1000, "kettle": 5000, "oven": 50000}
