"""What the person has written and agreed to: the file of servers, the values of its variables, the approvals."""
