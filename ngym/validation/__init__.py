"""Tests of an environment without a model: gold answers get their rewards, and worse ones less (`ng_validate`)."""

from ngym.validation.checks import Finding, described, examine
from ngym.validation.gold import Case, Environment, data_places, find_environment

__all__ = ["Case", "Environment", "Finding", "data_places", "described", "examine", "find_environment"]
