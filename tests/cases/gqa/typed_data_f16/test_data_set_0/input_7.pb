
*†€x€x€x€x€x€x€x€xÓpšwöwÿw€x€x€x€x©íôt×wüw€x€x€x€xì÷©q¥w÷wÿw€x€x€x»òÑiÞvðwþw€x€x€xŠiÌÂ…væwýw€x€x€x®w¢êšuÛwüw€x€x€xˆtÌñžtÎwûwÿw€x€xB	cos_cache