"""Why does a drafter accept so little in an engine? Its counts beside those of known mistakes."""
