"""Rewards that follow from a response's length; worker processes import this module: no torch here."""


def even_length(prompt, response, row):
    return float(len(response) % 2 == 0)


def length(prompt, response, row):
    return len(response) / 10
