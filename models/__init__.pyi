from .config import DecoderConfig as DecoderConfig
from .decoder import Decoder as Decoder
