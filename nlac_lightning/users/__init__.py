"""Users for dialogue environments: scripted, a model of our own, a model behind an endpoint."""

from nlac_lightning.users.base import User, UserReply, UserSession, UserTask
from nlac_lightning.users.language_model import EndpointUser, LocalUser
from nlac_lightning.users.scripted import ScriptedUser

__all__ = [
    "EndpointUser",
    "LocalUser",
    "ScriptedUser",
    "User",
    "UserReply",
    "UserSession",
    "UserTask",
]
