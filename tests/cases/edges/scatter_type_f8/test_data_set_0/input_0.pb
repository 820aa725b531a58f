B
past_cacheJP½Ò³LÉÄÏ;OÈÉÈZ¼<IDPPÑPËTQÉ<DÖOQÖÔÙÌZQÃÔN:¢QQ@ÌRÓÖRÉF¿È¸;BĞMºDĞØ*ÜÃ3ÓCÌOV×¹M¬ÍQÂ¸N