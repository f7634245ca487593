from paceline.comm.process_group import World as World
from paceline.commands.python_functions import compare as compare
from paceline.commands.python_functions import evaluate as evaluate
from paceline.commands.python_functions import plan as plan
from paceline.commands.python_functions import simulate as simulate
from paceline.commands.python_functions import train as train
from paceline.commands.python_functions import verify as verify
from paceline.commands.report import report as report
from paceline.custom_loop.place import place as place
from paceline.errors import CheckpointError as CheckpointError
from paceline.errors import DataError as DataError
from paceline.errors import DesyncError as DesyncError
from paceline.errors import ExitCode as ExitCode
from paceline.errors import JobError as JobError
from paceline.errors import LayoutError as LayoutError
from paceline.errors import MachineError as MachineError
from paceline.errors import NonFiniteError as NonFiniteError
from paceline.errors import PacelineError as PacelineError
from paceline.errors import ResumeError as ResumeError
from paceline.errors import RunError as RunError
from paceline.errors import UsageError as UsageError
from paceline.job import EarlyStopping as EarlyStopping
from paceline.job import Job as Job
from paceline.trainer.run import Run as Run
from paceline.verification.fingerprints.record import record as record

__version__: str
