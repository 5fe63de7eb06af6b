"""The accuracy of covey, math-verify, TRL and ms-swift on one table of answers."""
