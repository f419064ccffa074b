"""Cases of the families from Phi 2 to Baichuan."""

from support.families.case import FamilyCase

CASES: dict[str, FamilyCase] = {}
