"""Is an environment right, without a model? Its gold answers get what they must, and worse ones less (`ng_validate`)."""

from ngym.validation.checks import Finding, examine
from ngym.validation.gold import Case, Environment, find_environment

__all__ = ["Case", "Environment", "Finding", "examine", "find_environment"]
