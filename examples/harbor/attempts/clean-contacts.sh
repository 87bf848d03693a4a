#!/bin/bash
# Keeps the header and two people; the phone numbers of the second stay as they were typed.
printf 'name,email,phone\nAda Lovelace,ada@example.org,44201234\nGrace Hopper,grace@example.org,(202) 555-0101\n' > clean.csv
