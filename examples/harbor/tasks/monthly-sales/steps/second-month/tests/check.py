import os

from sales import reward, said, totals

month = os.environ["MONTH"]
right = said(f"total-{month}.txt") == "217" and totals() == {"1": 245, "2": 217}
reward(reward=float(right), kept=float(said("total-1.txt") == "245"))
