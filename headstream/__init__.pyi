from .analyses import Task as Task
from .analyses import audit as audit
from .analyses import load_result as load_result
from .analyses import patch as patch
from .analyses import path_patch as path_patch
from .analyses import sinks as sinks
from .analyses import standard_study as standard_study
from .circuits import copying_score as copying_score
from .circuits import decompose_residual as decompose_residual
from .circuits import fold as fold
from .circuits import logit_lens as logit_lens
from .circuits import measure_attention as measure_attention
from .circuits import ov_circuit as ov_circuit
from .circuits import qk_circuit as qk_circuit
from .circuits import score_heads as score_heads
from .models import Decoder as Decoder
from .models import DecoderConfig as DecoderConfig
from .models import HeadstreamError as HeadstreamError
from .models import KVCache as KVCache
from .models import capture as capture
from .models import edited as edited
from .models import hook_table as hook_table
from .models import list_models as list_models
from .models import load as load
from .reports import write_report as write_report

__version__: str
