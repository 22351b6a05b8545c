from .models import Decoder as Decoder
from .models import DecoderConfig as DecoderConfig

__version__: str
