#!/bin/bash
python3 /solution/clean.py
