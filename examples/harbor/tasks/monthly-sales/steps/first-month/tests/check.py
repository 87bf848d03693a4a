from sales import reward, said

reward(reward=float(said("total-1.txt") == "245"))
