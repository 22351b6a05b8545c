from .models import Decoder as Decoder
from .models import DecoderConfig as DecoderConfig
from .models import HeadstreamError as HeadstreamError
from .models import capture as capture
from .models import list_models as list_models
from .models import load as load

__version__: str
