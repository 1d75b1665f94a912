"""Is an environment right, without a model? Its gold answers get what they must, and worse ones less (`ng_validate`)."""

from ngym.validation.checks import Finding, described, examine
from ngym.validation.gold import Case, Environment, app_folder, data_places, find_environment

__all__ = ["Case", "Environment", "Finding", "app_folder", "data_places", "described", "examine", "find_environment"]
