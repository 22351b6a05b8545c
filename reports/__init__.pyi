from .write import render_report as render_report
from .write import write_report as write_report
