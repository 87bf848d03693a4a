import csv

with open("contacts.csv", newline="") as file:
    header, *rows = csv.reader(file)
people = {}
for name, email, phone in rows:
    address = email.strip().lower()
    digits = "".join(letter for letter in phone if letter.isdigit())
    people.setdefault(address, [name.strip().title(), address, digits])
with open("clean.csv", "w", newline="") as file:
    csv.writer(file).writerows([header, *people.values()])
